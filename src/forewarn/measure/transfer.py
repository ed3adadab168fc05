"""Transfers all values of a step from the device to the host in one copy, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import Measurement, Value, in_order
from forewarn.measure.engine.portable import wide
from forewarn.measure.probe import Array

T = TypeVar("T")


class _Here:
    """Values already in host memory."""

    def __init__(self, tensors: Sequence[Value]) -> None:
        self._arrays = [on_host(numbers) for numbers in tensors]

    def arrived(self) -> bool:
        return True

    def wait(self) -> None: ...

    def arrays(self) -> list[Array]:
        return self._arrays


class _UnderWay:
    """Values of one accelerator on their way to pinned memory; an event tells when they have arrived."""

    def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        packed = torch.cat([tensor.detach().reshape(-1).to(wide(device)) for tensor in tensors])
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=device.type == "cuda")
        self._host.copy_(packed, non_blocking=True)
        self._event = new_event(device)
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def arrays(self) -> list[Array]:
        flat = self._host.numpy().astype(np.float64)
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), self._shapes, strict=True)]


def new_event(device: torch.device) -> Any:
    """An event on the device's current stream."""
    return torch.get_device_module(device).Event()


def on_host(numbers: Value) -> Array:
    """Values as a float64 array, waiting if they are on a device; tensors are copied, since they may change later."""
    if isinstance(numbers, float):
        return np.array(numbers)
    if not isinstance(numbers, Tensor):
        return numbers.astype(np.float64, copy=False)  # nobody else writes to it any more
    plain = numbers.detach() if numbers.requires_grad else numbers
    plain = plain.float() if plain.dtype is torch.bfloat16 else plain  # numpy has no bfloat16
    array: Array = (plain if plain.is_cpu else plain.cpu()).numpy().astype(np.float64)
    return array


def rows_on_host(measurement: Measurement) -> Array:
    """The statistics engine's rows of some tensors, waiting for those on a device."""
    return in_order(measurement.order, [on_host(part) for part in measurement.rows])


@dataclass(slots=True)
class _Parcel(Generic[T]):
    label: T
    places: list[list[int]]
    shipments: list[Any]

    def arrays(self) -> list[Array]:
        if len(self.shipments) == 1:
            only: list[Array] = self.shipments[0].arrays()
            return only
        arrays: list[Array] = [np.empty(0)] * sum(map(len, self.places))
        for places, shipment in zip(self.places, self.shipments, strict=True):
            for index, array in zip(places, shipment.arrays(), strict=True):
                arrays[index] = array
        return arrays


class Transfer(Generic[T]):
    """A queue of parcels. On the CPU a parcel arrives at once, on an accelerator usually a step later."""

    def __init__(self) -> None:
        self._queue: deque[_Parcel[T]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue

    def send(self, label: T, tensors: Sequence[Value]) -> None:
        if tensors and all(not isinstance(tensor, Tensor) or tensor.is_cpu for tensor in tensors):
            self._queue.append(_Parcel(label, [], [_Here(tensors)]))
            return
        host_indices: list[int] = []
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and not tensor.is_cpu:
                by_device.setdefault(tensor.device, []).append((index, tensor))
            else:
                host_indices.append(index)
        parcel: _Parcel[T] = _Parcel(label, [], [])
        if host_indices:
            parcel.places.append(host_indices)
            parcel.shipments.append(_Here([tensors[index] for index in host_indices]))
        for device, indexed in by_device.items():
            parcel.places.append([index for index, _ in indexed])
            parcel.shipments.append(_UnderWay(device, [tensor for _, tensor in indexed]))
        self._queue.append(parcel)

    def receive(self, wait: bool = False) -> list[tuple[T, list[Array]]]:
        """The parcels that arrived since the last call, in the order sent; `wait` is for the end of a run."""
        received = []
        while self._queue:
            parcel = self._queue[0]
            if wait:
                for shipment in parcel.shipments:
                    shipment.wait()
            elif not all(shipment.arrived() for shipment in parcel.shipments):
                break
            self._queue.popleft()
            received.append((parcel.label, parcel.arrays()))
        return received

"""From the device to the host: all values of a step in one copy, read when they have arrived, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import Measurement, Numbers, in_order
from forewarn.measure.engine.portable import wide
from forewarn.measure.probe import Array

T = TypeVar("T")


class _Here:
    """Values that are in host memory already."""

    def __init__(self, tensors: Sequence[Numbers]) -> None:
        self._arrays = [on_host(each) for each in tensors]

    def arrived(self) -> bool:
        return True

    def wait(self) -> None: ...

    def arrays(self) -> list[Array]:
        return self._arrays


class _UnderWay:
    """Values of one accelerator on their way to pinned memory; an event tells when they are there."""

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
    """An event of the device's present stream."""
    return torch.get_device_module(device).Event()


def on_host(numbers: Numbers) -> Array:
    """Values as a float64 array, waited for if they are elsewhere; a copy of a tensor's, which may change later."""
    if not isinstance(numbers, Tensor):
        return numbers.astype(np.float64, copy=False)  # given away: nobody writes to it any more
    plain = numbers.detach() if numbers.requires_grad else numbers
    plain = plain.float() if plain.dtype is torch.bfloat16 else plain  # numpy has no bfloat16
    found: Array = (plain if plain.is_cpu else plain.cpu()).numpy().astype(np.float64)
    return found


def rows_on_host(found: Measurement) -> Array:
    """What the statistics engine said of some tensors, a row for each, waited for."""
    return in_order(found.order, [on_host(part) for part in found.rows])


@dataclass(slots=True)
class _Parcel(Generic[T]):
    label: T
    places: list[list[int]]
    shipments: list[Any]

    def arrays(self) -> list[Array]:
        if len(self.shipments) == 1:
            only: list[Array] = self.shipments[0].arrays()
            return only
        found: list[Array] = [np.empty(0)] * sum(map(len, self.places))
        for places, shipment in zip(self.places, self.shipments, strict=True):
            for at, array in zip(places, shipment.arrays(), strict=True):
                found[at] = array
        return found


class Transfer(Generic[T]):
    """A queue of parcels. On the CPU a parcel arrives at once, on an accelerator usually a step later."""

    def __init__(self) -> None:
        self._queue: deque[_Parcel[T]] = deque()

    def send(self, label: T, tensors: Sequence[Numbers]) -> None:
        here: list[int] = []
        elsewhere: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for at, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and not tensor.is_cpu:
                elsewhere.setdefault(tensor.device, []).append((at, tensor))
            else:
                here.append(at)
        parcel = _Parcel(label, [here], [_Here([tensors[at] for at in here])]) if here else _Parcel(label, [], [])
        for device, several in elsewhere.items():
            parcel.places.append([at for at, _ in several])
            parcel.shipments.append(_UnderWay(device, [tensor for _, tensor in several]))
        self._queue.append(parcel)

    def receive(self, wait: bool = False) -> list[tuple[T, list[Array]]]:
        """What has arrived since the last call, in the order of sending; `wait` is for the end of a run."""
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

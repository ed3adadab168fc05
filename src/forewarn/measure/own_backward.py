"""A backward pass of the monitor's own in a model that several ranks train: it sends no message of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("_allgather_base_", "allgather_into_tensor_coalesced_")
"""Operations by which FSDP2 gathers the shards of a module."""

_HARMLESS = ("wait_tensor",)


class NeedsMessagesError(Exception):
    """The pass would have sent a message between ranks."""


class _NoMessages(TorchDispatchMode):
    """Raises before a message is sent: the other ranks may not make this pass, and would then wait forever."""

    def __init__(self, allowed: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowed = (*allowed, *_HARMLESS)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # first as operations on the parts of this rank
        if "c10d" in function.namespace and function._opname not in self._allowed:
            raise NeedsMessagesError(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def without_messages(model: nn.Module) -> Iterator[None]:
    """Run backward passes on this rank alone.

    Under FSDP2 such a pass gathers the same shards in the same order as the training's own pass, which follows and
    finds them there. So all ranks send the same messages in the same order, whether they make this pass or not.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield
        return
    states = _fsdp_states(model)
    groups = [group for state in states for group in _groups(state)]
    contexts = [state._state_ctx for state in states]
    after = [group.reshard_after_backward for group in groups]
    last = [context.is_last_backward for context in contexts]
    for group in groups:
        group.reshard_after_backward = False
    for context in contexts:
        context.is_last_backward = False
    try:
        with _NoMessages(_GATHERS if groups else ()):
            yield
    except BaseException:
        for context in contexts:  # what the pass would have done at its end
            context.post_backward_final_callback_queued = False
        raise
    finally:
        for group, value in zip(groups, after, strict=True):
            group.reshard_after_backward = value
        for context, value in zip(contexts, last, strict=True):
            context.is_last_backward = value


def whole_parameters(model: nn.Module) -> dict[int, Tensor]:
    """By the id of each parameter that FSDP2 shards, the whole one that a forward pass has used."""
    params = (one for state in _fsdp_states(model) for group in _groups(state) for one in group.fsdp_params)
    return {id(one.sharded_param): one._unsharded_param for one in params if hasattr(one, "_unsharded_param")}


def reduces_unused(model: nn.Module) -> bool:
    """Whether FSDP2 sums up gradients after each pass, even those of parameters that it did not reach."""
    groups = (group for state in _fsdp_states(model) for group in _groups(state))
    return any(getattr(group, "reduce_scatter_unused_params", False) for group in groups)


def holds_gradients(model: nn.Module) -> bool:
    """Whether FSDP2 holds gradients of earlier micro-batches, which the end of any backward pass may sum up."""
    params = (one for state in _fsdp_states(model) for group in _groups(state) for one in group.fsdp_params)
    return any(
        getattr(one, "unsharded_accumulated_grad", None) is not None
        or (hasattr(one, "_unsharded_param") and one._unsharded_param.grad is not None)
        for one in params
    )


def _fsdp_states(model: nn.Module) -> list[Any]:
    modules = [module for module in model.modules() if "FSDPModule" in {base.__name__ for base in type(module).__mro__}]
    return [module._get_fsdp_state() for module in modules]  # type: ignore[operator]


def _groups(state: Any) -> Sequence[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]

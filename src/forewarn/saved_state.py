"""The state that a monitor saves for a resumed run: what is in it, and states of earlier versions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from forewarn.measure.portable_state import to_arrays

_log = logging.getLogger("forewarn")

_UNSAVED = "unsaved"
"""Key for the reason if the state could not be saved."""


def unsaved(step: int, error: Exception) -> dict[str, Any]:
    """The state of a monitor that could not be saved."""
    return {"at": step, _UNSAVED: f"{type(error).__name__}: {error}"}


def is_unsaved(state: Any) -> bool:
    """Whether there is only the step to continue from, which the log says."""
    if not isinstance(state, Mapping) or _UNSAVED not in state:
        return False
    _log.warning("the monitor's state could not be saved (%s), so the monitor starts from scratch", state[_UNSAVED])
    return True


def checked_state(state: Any) -> dict[str, Any]:
    """A state with all entries of this version; raises ValueError if it is not a monitor's."""
    if not isinstance(state, Mapping) or not {"at", "history", "ledger", "probes"} <= state.keys():
        received = f"a dict with the keys {sorted(map(str, state))}" if isinstance(state, Mapping) else repr(state)
        raise ValueError(f"state must be what monitor.state_dict() returned, not {received}")
    arrays: dict[str, Any] = to_arrays(state)
    frozen = arrays["probes"].get("updates", {}).get("checks", {})  # earlier versions kept this count in the probe
    return {
        "schedule": {"until": arrays.get("dense_until", -1), "stretched": ()},
        "epoch_ended": -1, "patience": {}, "adjusted": (), "balance": {}, "policy": {}, "unavailable": {},
        **arrays,
        "history": {"derived": {"frozen-weight": frozen}, **arrays["history"]},
    }  # fmt: skip

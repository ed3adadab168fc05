"""What a fault is: a change that is a mistake, and what a right answer to it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.workload import Trait, Workload

Make = Callable[[Draw], Change]


@dataclass(frozen=True, slots=True)
class Fault:
    """A class of faults. What counts as its cause is declared here, before any run."""

    name: str
    make: Make
    summary: str
    causes: tuple[str, ...]
    """Rules that name the cause: a code, or a code and the cause in its evidence, such as `U101:not_in_optimizer`."""
    words: str
    """A regular expression. An alert whose name, headline or cause matches it names the cause, whatever its rule."""
    fixes: frozenset[str]
    """Actions of remedies that name the fix."""
    needs: frozenset[Trait]
    unlike: frozenset[Trait]
    """What a workload must not have, because the change would be no fault there."""
    is_dynamic: bool
    """Whether it begins during the run."""
    is_instant: bool
    """Whether its first step is the damage already, as with a batch of NaN, so that no warning can come before it."""
    is_told_as_information: bool
    """Whether it is no fault by itself but worth a line, so that information counts as detection."""

    def fits(self, workload: Workload) -> bool:
        return self.needs <= workload.traits and not self.unlike & workload.traits

    def is_named_by(self, code: str, cause: str, text: str) -> bool:
        """Whether an alert with this code, cause in its evidence, and text names the cause of this fault."""
        named = code in self.causes or f"{code}:{cause}" in self.causes
        return named or bool(self.words and re.search(self.words, text, re.IGNORECASE))


def fault(
    name: str,
    *,
    causes: str = "",
    words: str = "",
    fixes: str = "",
    needs: Collection[Trait] = (),
    unlike: Collection[Trait] = (),
    is_dynamic: bool = False,
    is_instant: bool = False,
    is_told_as_information: bool = False,
) -> Callable[[Make], Fault]:
    """Make a change a fault. Names in `causes` and `fixes` are separated by spaces."""

    def declare(make: Make) -> Fault:
        summary = (make.__doc__ or "").partition("\n")[0]
        return Fault(
            name, make, summary, tuple(causes.split()), words, frozenset(fixes.split()), frozenset(needs),
            frozenset(unlike), is_dynamic, is_instant, is_told_as_information,
        )  # fmt: skip

    return declare

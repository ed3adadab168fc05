"""A run as TensorBoard event files: every reading, histogram, alert and action, under the tags of `TensorBoardView`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forewarn.types import Action, Alert, Distribution
from forewarn.views.export.readings import Selection, Tell
from forewarn.views.tensorboard import TensorBoardView


def write_events(selection: Selection, folder: Path, tell: Tell) -> None:
    """Scalars come first, in the order of steps, then the histograms of one tensor after the other."""
    view = _CompleteView(folder, topk=0, detail="full")
    changed, taken = _by_step(selection)
    try:
        for step, blocks in selection.steps():
            tell("scalars", len(blocks))
            view.show(step, blocks, changed.pop(step, []), taken.pop(step, []))
        for step in sorted({*changed, *taken}):
            view.show(step, [], changed.get(step, []), taken.get(step, []))
        for name, scope in _histograms_of(selection):
            tell(name, 1)
            stored = selection.run.histograms(name, scope)
            for place, step in enumerate(stored.steps.tolist()):
                if selection.includes(step):
                    counts, zeros = stored.counts[place : place + 1], stored.zeros[place : place + 1]
                    time = float(stored.times[place])
                    view.show_histograms(step, [Distribution(step, time, name, (scope,), counts, zeros)])
                    view.show(step, [], [], [])
    finally:
        view.close()


def num_histograms(selection: Selection) -> int:
    """How many tensors have histograms to export."""
    return sum(1 for _ in _histograms_of(selection))


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A new folder that replaces `target` once it is complete. Only a folder of event files is replaced."""
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process with the same process id
    try:
        draft.mkdir()
        yield draft
        if target.exists():
            others = [path.name for path in target.iterdir() if not path.name.startswith("events.out.tfevents.")]
            if others:
                raise FileExistsError(0, f"it holds {others[0]}, which is no event file", str(target))
            shutil.rmtree(target)
        draft.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _CompleteView(TensorBoardView):
    _is_complete = True


def _by_step(selection: Selection) -> tuple[dict[int, list[Alert]], dict[int, list[Action]]]:
    changed: dict[int, list[Alert]] = {}
    taken: dict[int, list[Action]] = {}
    for change in selection.run.alert_changes():
        if selection.includes(change.step):
            changed.setdefault(change.step, []).append(change.alert)
    for action in selection.run.actions():
        if selection.includes(action.step):
            taken.setdefault(action.step, []).append(action)
    return changed, taken


def _histograms_of(selection: Selection) -> Iterator[tuple[str, str]]:
    """The tensors with histograms. A histogram is chosen with any series of its tensor and family."""
    families = {(name.partition("/")[0], scope) for name, scopes in selection.scopes.items() for scope in scopes}
    for name, scopes in selection.run.distributions().items():
        yield from ((name, scope) for scope in scopes if (name.partition("/")[0], scope) in families)

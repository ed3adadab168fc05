"""Runs a script as `python` would, and watches what it trains.

Nothing here imports torch: the script decides whether and when. What it imports is noticed right after the import.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from forewarn.types import Action, Alert, Block, RunEnd, RunStart
from forewarn.views import BookendView, View
from forewarn.views.console import AlertLines

if TYPE_CHECKING:
    from forewarn.integrations.discovery import Discovery
    from forewarn.monitor import Monitor

COMPLETED = "completed"
LINES_TO_ADD = """\
    import forewarn
    monitor = forewarn.watch(model, optimizer)  # before the loop
    monitor.step(loss)                          # in the loop, once per optimizer step"""
"""What to add to a script that cannot be watched from outside."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script or a module with its arguments, as on the command line of `python`."""

    target: str
    """The path of a script, or the name of a module."""
    arguments: Sequence[str] = ()
    is_module: bool = False


@dataclass(slots=True)
class Ending:
    """What was seen of a script, when it has ended."""

    runs: list[Path] = field(default_factory=list)
    """The recorded runs, in order. Empty in a process that does not record, such as rank 1."""
    remarks: list[str] = field(default_factory=list)
    """What could not be watched, and what to do about it."""


class Watched:
    """Runs one script in this process and watches it; `ended` is called when the process exits."""

    def __init__(self, script: Script, settings: Mapping[str, Any], ended: Callable[[Ending], None]) -> None:
        self._script = script
        self._settings = dict(settings)
        """The arguments of `forewarn.watch`."""
        self._ended = ended
        self._reason = COMPLETED
        self._process = os.getpid()
        self._discovery: Discovery | None = None
        self._adapters = False
        """Whether a callback was added to a trainer of a framework."""
        self._foreign: list[Monitor] = []
        """Monitors that neither the discovery nor this class has made: those of adapters and of the script itself."""

    def run(self) -> None:
        """Run the script to its end. What it raises is printed as `python` prints it, and raised."""
        observe_imports(
            {
                "torch": self._torch_imported,
                "forewarn.monitor": self._monitor_imported,
                "transformers.trainer": self._transformers_imported,
                "lightning.pytorch.trainer.trainer": self._lightning_imported,
                "pytorch_lightning.trainer.trainer": self._lightning_imported,
            }
        )
        self._finish_at_exit()
        self._replace_exit()
        try:
            execute(self._script)
        except SystemExit as error:
            self._reason = COMPLETED if error.code in (None, 0) else f"SystemExit: {error.code}"
            raise
        except BaseException as error:
            self._reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if isinstance(error, KeyboardInterrupt):
                self._finish()  # an import at exit would make Python forget that it was interrupted
            raise

    def _finish_at_exit(self) -> None:
        """Finish when the threads of the script have ended, before the store closes what is still open."""
        atexit.unregister(self._finish)
        atexit.register(self._finish)

    def _finish(self) -> None:
        """Close the runs and show the diagnosis, once, and never in a forked child."""
        if os.getpid() != self._process:
            return
        self._process = -1
        ending = Ending() if self._discovery is None else self._discovery.finish(self._reason)
        if self._adapters:
            for monitor in self._foreign:
                monitor.close(self._reason)  # after an exception, frameworks call no callback
            ending.runs += [monitor.path for monitor in self._foreign if monitor.path is not None and monitor.at]
        elif self._foreign:
            ending.remarks = ["the script calls forewarn itself, so `forewarn run` has added nothing"]
        if not ending.remarks and not self._foreign and not (self._discovery and self._discovery.any_steps):
            ending.remarks.append(self._why_nothing())
        if os.environ.get("RANK", "0") != "0":
            ending.remarks.clear()  # the first process says it for all
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._ended(ending)

    def _why_nothing(self) -> str:
        """Why there is nothing to judge, in one sentence."""
        if self._discovery is None:
            return "the script does not use torch, so there is nothing to judge"
        if any(name.startswith("multiprocessing.popen") for name in sys.modules):
            return (
                "no optimizer stepped in this process, so there is nothing to judge; if the processes that it started "
                f"train, add these lines there:\n{LINES_TO_ADD}"
            )
        if self._discovery.any_backward:
            return "gradients were computed, but no torch optimizer stepped, so there is nothing to judge"
        return "nothing was trained in this process, so there is nothing to judge"

    def _replace_exit(self) -> None:
        """Finish before `os._exit`, which calls no exit handlers."""
        leave = os._exit

        @functools.wraps(leave)
        def finish_and_leave(status: int) -> None:
            if self._process == os.getpid():
                self._reason = COMPLETED if status == 0 else f"SystemExit: {status}"
                with contextlib.suppress(Exception):
                    self._finish()
            leave(status)

        os._exit = finish_and_leave  # type: ignore[assignment]

    def _torch_imported(self, module: ModuleType) -> None:
        from forewarn.integrations.discovery import Discovery

        self._discovery = Discovery(self._settings)
        self._discovery.install()

    def _monitor_imported(self, module: Any) -> None:
        """Notice monitors that adapters or the script itself make."""
        begin = module.Monitor.begin

        @functools.wraps(begin)
        def noticed(monitor: Monitor, *args: Any, **kwargs: Any) -> None:
            begin(monitor, *args, **kwargs)
            self._finish_at_exit()
            if self._discovery is not None and not self._discovery.is_beginning:
                self._foreign.append(monitor)
                self._discovery.leave_alone(monitor._optimizers, everything=not self._adapters)

        module.Monitor.begin = noticed

    def _transformers_imported(self, module: Any) -> None:
        self._add_callbacks(module.Trainer, "huggingface", lambda trainer: trainer.callback_handler.callbacks)

    def _lightning_imported(self, module: Any) -> None:
        self._add_callbacks(module.Trainer, "lightning", lambda trainer: trainer.callbacks)

    def _add_callbacks(self, trainer_class: Any, adapter: str, callbacks_of: Callable[[Any], list[Any]]) -> None:
        """Add the callback of an adapter to every new trainer that has none."""
        original = trainer_class.__init__

        def add(trainer: Any) -> None:
            kind = importlib.import_module(f"forewarn.integrations.{adapter}").ForewarnCallback
            callbacks = callbacks_of(trainer)
            if not any(isinstance(callback, kind) for callback in callbacks):
                views = [StartAndAlerts(self._settings.get("views"))]
                callbacks.insert(0, kind(**self._settings | {"views": views}))  # checkpoints come last
                self._adapters = True

        @functools.wraps(original)
        def initialize(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            _guarded(add, trainer)

        trainer_class.__init__ = initialize


class StartAndAlerts:
    """Shows the start of a run once, even if it is continued, and its alerts; the end is left to the diagnosis."""

    def __init__(self, views: Sequence[View] | None) -> None:
        self._views = [AlertLines()] if views is None else views
        self._has_begun = False

    def begin(self, start: RunStart) -> None:
        if not self._has_begun:
            self._has_begun = True
            for view in self._views:
                if isinstance(view, BookendView):
                    view.begin(start)

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        for view in self._views:
            view.show(step, blocks, changed, taken)

    def end(self, end: RunEnd) -> None:
        """The diagnosis follows."""

    def close(self) -> None:
        """Its views are closed with the last run."""


def execute(script: Script) -> None:
    """Run a script as the main program of this process. An exception is shown by `sys.excepthook` and raised again."""
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = ["-m" if script.is_module else script.target, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.target))
    try:
        if script.is_module:
            runpy._run_module_as_main(script.target)  # type: ignore[attr-defined]  # what `python -m` calls
        else:
            path = os.path.abspath(script.target)
            main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(_without_own(trace and trace.tb_next)), error.__traceback__)
        sys.excepthook = lambda *shown: None
        raise


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package's observers, as the script would have raised it alone."""
    own = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("script.py", "discovery.py"))
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(own):
        first = first.tb_next
    last = first
    while last is not None:
        after = last.tb_next
        while after is not None and after.tb_frame.f_code.co_filename.startswith(own):
            after = after.tb_next
        last.tb_next = after
        last = after
    return first


def observe_imports(actions: dict[str, Callable[[Any], None]]) -> None:
    """Call each action with its module right after the module is imported; at once if it already is."""
    waiting = {}
    for name, action in actions.items():
        if name in sys.modules:
            _guarded(action, sys.modules[name])
        else:
            waiting[name] = action
    sys.meta_path.insert(0, _ImportObserver(waiting))


class _ImportObserver:
    """Finds no module itself: it lets the other finders find one, and calls an action after its import."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self._actions.pop(name, None)
        spec = None if action is None else importlib.util.find_spec(name)
        if action is None or spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute  # type: ignore[method-assign]
            execute(module)
            _guarded(action, module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _guarded(action: Callable[[Any], None], argument: Any) -> None:
    """Keep a failure of ours away from the script."""
    try:
        action(argument)
    except Exception:
        logging.getLogger("forewarn").exception("the script cannot be watched; it goes on alone")

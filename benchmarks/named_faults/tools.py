"""The tools, each used the way its own documentation says, at its defaults."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import forewarn
from benchmarks.named_faults.scoring import Remark


class Tool:
    """A tool around one training run; the calls are those of the loop, in its order."""

    name: str
    package: str
    use: str
    """How it is used here, in one line."""
    strength: str
    """What it is good at that this comparison does not show."""
    judges = True

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def combine(self, losses: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
        return torch.stack([weights.get(name, 1.0) * loss for name, loss in losses.items()]).sum()

    def after_backward(self, loss: Tensor) -> None:
        pass

    def after_step(self, loss: Tensor) -> None:
        pass

    def after_epoch(self, train_loss: float, val_loss: float) -> None:
        pass

    def report(self) -> tuple[list[Remark], str]:
        """End the run: its warnings, and the whole report."""
        raise NotImplementedError


class Forewarn(Tool):
    name = "forewarn"
    package = "forewarn"
    use = (
        "`watch`, `monitor.step(loss)`, `end_epoch` where there is a validation loss, `combine_losses` where there are "
        "two tasks; its alerts of severity warning and critical"
    )
    strength = "warns while the run trains, and gives a cause and a first remedy with numbers"

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.monitor = forewarn.watch(model, optimizer, run=folder / "run")

    def combine(self, losses: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
        if len(losses) == 1:
            return super().combine(losses, weights)
        return self.monitor.combine_losses(losses, weights=weights)

    def after_step(self, loss: Tensor) -> None:
        self.monitor.step(loss)

    def after_epoch(self, train_loss: float, val_loss: float) -> None:
        self.monitor.end_epoch(train_loss=train_loss, val_loss=val_loss)

    def report(self) -> tuple[list[Remark], str]:
        self.monitor.close()
        remarks = []
        for alert in self.monitor.alerts:
            if alert.fired is None or alert.severity < forewarn.Severity.WARNING:
                continue
            advice, *further = [f"do: {remedy.do}" for remedy in alert.remedies] or [""]
            words = (alert.name, f"step {alert.fired}", alert.headline, alert.numbers, alert.cause, advice)
            kind = f"{alert.name} {alert.severity}"
            remarks.append(Remark(kind, " · ".join(filter(None, words)), " · ".join(further)))
        return remarks, "\n".join(remark.text for remark in remarks)


class Torchmortem(Tool):
    name = "torchmortem"
    package = "torchmortem"
    use = (
        "`Autopsy(model, optimizer=…)`, `autopsy.step(loss=…)` and its report; findings of severity warning and "
        "critical, and its insights"
    )
    strength = (
        "an HTML report after the run with charts, health scores per layer, long explanations and references; rank "
        "collapse, gradient noise, edge of stability"
    )

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().attach(model, optimizer, folder)
        self.autopsy: Any = import_module("torchmortem").Autopsy(model, optimizer=optimizer)
        self.autopsy.attach()

    def after_step(self, loss: Tensor) -> None:
        self.autopsy.step(loss=loss.item())

    def report(self) -> tuple[list[Remark], str]:
        self.autopsy.detach()
        report = self.autopsy.report(self.folder / "autopsy.html")
        remarks = []
        for finding in report.findings:
            if finding.severity.name != "INFO":
                kind = finding.title.partition(" in ")[0]
                remarks.append(self._remark(f"{kind} {finding.severity.name.lower()}", finding))
        remarks += [self._remark(f"insight {insight.rule_name}", insight) for insight in report.insights]
        lines = [report.executive_summary, *(f"{found.severity.name}: {found.summary}" for found in report.findings)]
        return remarks, "\n".join(lines)

    @staticmethod
    def _remark(kind: str, said: Any) -> Remark:
        first, *further = said.remediation or [""]
        return Remark(kind, f"{said.title}. {said.summary} {first}", " ".join([said.detail, *further]))


class Trainscope(Tool):
    name = "trainscope"
    package = "trainscope"
    use = (
        "`TrainScope(model, optimizer).attach()`, `scope.step(loss)` before the optimizer step, its log, `trainscope "
        "report`, and the story of its browser's Spike Inspector"
    )
    strength = (
        "made for loss spikes of large language models: a browser to scrub through the steps around a spike, routing "
        "of experts, RNG states and replay without the bad batches"
    )

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().attach(model, optimizer, folder)
        config: Any = import_module("trainscope.core.config").TrainScopeConfig(run_dir=str(folder), run_name="run")
        self.scope: Any = import_module("trainscope").TrainScope(model, optimizer, config=config).attach()
        self.remarks: list[Remark] = []
        log = logging.Handler(logging.WARNING)
        log.emit = lambda record: self._remark(f"log {record.msg}", record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("trainscope").addHandler(log)

    def after_backward(self, loss: Tensor) -> None:
        spike = self.scope.step(loss.item())
        if spike:
            self._remark("spike", f"Spike at step {spike['step']}, score={spike['spike_score']:.2f}")

    def _remark(self, kind: str, text: str) -> None:
        if kind not in {remark.kind for remark in self.remarks}:
            self.remarks.append(Remark(kind, text))

    def report(self) -> tuple[list[Remark], str]:
        self.scope.detach()
        reports: Any = import_module("trainscope.report")
        found = asyncio.run(reports.build_report(self.folder / "run", False))
        signature = found["signal_signature"]
        for signal in signature["fired"]:
            self._remark(f"signal {signal}", f"{signal} crossed at step {signature['first_steps'][signal]}")
        if signature["explosion_step"] is not None:
            self._remark("explosion", f"Objective explosion at step {signature['explosion_step']}")
        if found["spike_steps"]:
            story = self._story(found["spike_steps"][0])
            self._remark(f"story {story[0][0]}", " → ".join(f"{what} (Step {step})" for what, step in story))
        return self.remarks, reports.render(found, False, "markdown")

    def _story(self, spike: int) -> list[tuple[str, int]]:
        """What the Spike Inspector shows of the first spike: the rule of its script, which only a browser runs."""
        path = self.folder / "run" / "spikes" / f"spike_step_{spike}.arrow"
        window: Any = import_module("trainscope.analysis").read_arrow_sync(path)
        loss = window[0]["loss"] or 1
        norm = window[0]["grad_norm_before_clip"] or 1
        events: dict[str, Callable[[Any], bool]] = {
            "Loss Shift": lambda row: row["spike_score"] >= 3.5 or row["loss"] > loss * 1.5,
            "Gradient Explosion": lambda row: row["grad_norm_before_clip"] > max(5, norm * 3),
            "NaN / Inf Collapse": lambda row: not math.isfinite(row["loss"]),
        }
        first = {what: next((row["step"] for row in window if happens(row)), None) for what, happens in events.items()}
        story = sorted(((what, step) for what, step in first.items() if step is not None), key=lambda event: event[1])
        return story or [("Distributional Shift", spike)]


class Pulsegrad(Tool):
    name = "pulsegrad"
    package = "pulsegrad"
    use = (
        "`pulsegrad.watch(model, optimizer)`, `pulsegrad.log` of the validation loss, `pug findings` and `pug "
        "summary`; findings of severity warning and above, the verdict and the flags of the summary"
    )
    strength = "needs one line and no call per step; a live web view, findings while the run trains, LoRA adapters"

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        os.environ["PULSEGRAD_RUNS_DIR"] = str(folder / "runs")
        super().attach(model, optimizer, folder)
        self.pulsegrad: Any = import_module("pulsegrad")
        self.session = self.pulsegrad.watch(model, optimizer, run_dir=folder)

    def after_epoch(self, train_loss: float, val_loss: float) -> None:
        self.pulsegrad.log("val_loss", val_loss)

    def report(self) -> tuple[list[Remark], str]:
        self.session.close()
        database = next(self.folder.glob("*/db.sqlite"), None)
        if database is None:
            return [], "no run was recorded"
        rows = import_module("pulsegrad._cli.run_index").list_findings(database)
        summary: Any = import_module("pulsegrad._cli.summary")
        card = summary.load_summary(database)
        remarks = [
            Remark(f"{row['detector']} {row['severity']}", f"{row['detector']}: {row['message']}")
            for row in rows
            if row["severity"] not in ("info", "notice")
        ]
        if card.verdict != "ok":
            kind = "NaN" if card.nan_rows or card.inf_rows else "loss above its minimum"
            remarks.append(Remark(f"verdict {kind}", f"{card.verdict.upper()}: {card.verdict_reason}"))
        if card.dead_act_modules:
            dead = ", ".join(f"{module.module_id} {module.pct_dead:.1f}%" for module in card.dead_act_modules)
            remarks.append(Remark("flag dead activations", f"flags: dead activations {dead}"))
        findings = import_module("pulsegrad._cli.findings").format_findings(rows)
        return remarks, f"{findings}\n{summary.format_summary(card)}"


class Wandb(Tool):
    name = "wandb"
    package = "wandb"
    use = '`wandb.watch(model, log="all", log_freq=10)` and `wandb.log`, offline'
    strength = (
        "experiment tracking for a team: every series and histogram of every run, sweeps, artifacts, alerts you write"
    )
    judges = False

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        os.environ.update(WANDB_ERROR_REPORTING="false", WANDB_CACHE_DIR=str(folder), WANDB_DIR=str(folder))
        super().attach(model, optimizer, folder)
        wandb: Any = import_module("wandb")
        settings = wandb.Settings(x_disable_stats=True)
        self.run: Any = wandb.init(project="faults", mode="offline", dir=str(folder), settings=settings)
        self.run.watch(model, log="all", log_freq=10)

    def after_step(self, loss: Tensor) -> None:
        self.run.log({"loss": loss.item()})

    def after_epoch(self, train_loss: float, val_loss: float) -> None:
        self.run.log({"val_loss": val_loss})

    def report(self) -> tuple[list[Remark], str]:
        names = sorted(name for name in dict(self.run.summary) if not name.startswith("_"))
        self.run.finish()
        return [], f"recorded {len(names)} series: {', '.join(names)}"


class TensorBoard(Tool):
    name = "TensorBoard"
    package = "tensorboard"
    use = "`SummaryWriter.add_scalar` of the loss and of the norm of every gradient"
    strength = "free, local and everywhere; scalars, histograms, graphs, embeddings and profiles"
    judges = False

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().attach(model, optimizer, folder)
        self.writer: Any = SummaryWriter(str(folder))
        self.step, self.names = 0, {"loss"}

    def after_backward(self, loss: Tensor) -> None:
        self._add("loss", loss.item())
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._add(f"gradient_norm/{name}", parameter.grad.norm().item())
        self.step += 1

    def after_epoch(self, train_loss: float, val_loss: float) -> None:
        self._add("val_loss", val_loss)

    def _add(self, name: str, value: float) -> None:
        self.names.add(name)
        self.writer.add_scalar(name, value, self.step)

    def report(self) -> tuple[list[Remark], str]:
        self.writer.close()
        return [], f"recorded {len(self.names)} series: {', '.join(sorted(self.names))}"


TOOLS: dict[str, type[Tool]] = {
    tool.name: tool for tool in (Forewarn, Torchmortem, Trainscope, Pulsegrad, Wandb, TensorBoard)
}

"""`forewarn train`: reference training runs with forewarn attached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from forewarn.cli.multitask import multitask
from forewarn.cli.option_groups import AT_LEAST_0 as _AT_LEAST_0
from forewarn.cli.option_groups import POSITIVE as _POSITIVE
from forewarn.cli.option_groups import GroupedCommand as _GroupedCommand
from forewarn.cli.option_groups import grouped_rules_option as _rules_option
from forewarn.cli.option_groups import option as _option
from forewarn.cli.option_groups import options as _options
from forewarn.cli.terminal import INTERRUPTED, Failure, SuggestingGroup, loaded_rules, newest, output, torch_on

if TYPE_CHECKING:
    from torch import Tensor

    from forewarn.lab import Trainer

VALIDATION_BATCHES = 20
"""Fixed batches of held-out text; enough for a standard error of about 0.02."""
_SEED_STEP = 1_000_003
"""Difference between the seeds of two processes."""
WARM_UP_SHARE = 0.05
"""Fraction of all steps during which the learning rate rises to its peak."""


@click.group(cls=SuggestingGroup)
def command() -> None:
    """Train an example model with forewarn attached.

    \b
    Examples:
      forewarn train lm --max-steps 200 --weight-monitor
      forewarn train multitask --task-weight type=0.001
      forewarn train lm --help
    """


command.add_command(multitask)


@command.command(
    cls=_GroupedCommand,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-"), "max_content_width": 100},
)
@_options(
    "Data",
    _option("--dataset", default="stdlib", metavar="stdlib|PATH|wikitext",
            help="Training text: Python's standard library, a text file, or WikiText-2 through `datasets`."),
)  # fmt: skip
@_options(
    "Training",
    _option("--epochs", type=_POSITIVE, default=1, help="Passes over the text."),
    _option("--max-steps", type=_POSITIVE, help="Stop after N optimizer steps."),
    _option("--batch-size", type=_POSITIVE, default=16, help="Sequences per batch."),
    _option("--accumulation-steps", type=_POSITIVE, default=1, help="Batches per optimizer step."),
    _option("--lr", type=click.FloatRange(min=0.0, min_open=True), default=1e-3,
            help="Peak learning rate; 5% warm-up, then cosine decay to a tenth."),
    _option("--weight-decay", type=_AT_LEAST_0, default=0.01, help="Weight decay of AdamW."),
    _option("--gradient-clip", type=_AT_LEAST_0, default=1.0,
            help="Clip the global gradient norm to X; 0 disables clipping."),
    _option("--amp", type=click.Choice(["off", "bf16", "fp16"]), default="off", help="Mixed precision."),
    _option("--device", default="cpu", help="Device to train on: cpu, cuda, cuda:1, mps, …"),
    _option("--parallel", type=click.Choice(["off", "ddp", "fsdp", "tp"]), default="off",
            help="Train in the processes that torchrun starts: copies, shards (FSDP2), or split layers."),
    _option("--threads", type=_POSITIVE, default=1, help="CPU threads; more only slow down a small model."),
    _option("--seed", type=int, default=0, help="Random seed for weights, dropout and data order."),
)  # fmt: skip
@_options(
    "Model",
    _option("--depth", type=_POSITIVE, default=4, help="Number of transformer blocks."),
    _option("--width", type=_POSITIVE, default=96, help="Width of the hidden state; a multiple of --heads."),
    _option("--heads", type=_POSITIVE, default=4, help="Number of attention heads."),
    _option("--context", type=_POSITIVE, default=64, help="Context length in bytes."),
    _option("--dropout", type=click.FloatRange(0.0, 0.99), default=0.0, help="Dropout probability."),
    _option("--qk-norm", is_flag=True, help="Normalize queries and keys to keep attention logits small."),
)
@_options(
    "Monitor",
    _option("--monitor-config", type=click.Path(path_type=Path), metavar="FILE",
            help="Settings of the monitor in TOML, such as thresholds; other options that you give win."),
    _option("--gradient-monitor", is_flag=True,
            help="Print gradient norms every --log-interval steps, and a summary at the end."),
    _option("--log-layers", type=click.IntRange(min=0), default=0, metavar="N",
            help="Every N steps, print each layer's gradient norm, mean and std and its update ratio; 0: never."),
)  # fmt: skip
@_options(
    "Weight monitor",
    _option("--weight-monitor", is_flag=True,
            help="Measure the gradient, weight and update of every tensor."),
    _option("--weight-monitor-interval", type=_POSITIVE, default=100, metavar="N",
            help="Measure the first 10 steps, then every N steps."),
    _option("--weight-monitor-sample-size", type=_POSITIVE, default=1024, metavar="SIZE",
            help="Number of weights sampled per tensor to measure its update."),
    _option("--monitor-topk", type=click.IntRange(min=0), default=5, help="Number of tensors to list by name."),
    _rules_option,
)  # fmt: skip
@_options(
    "Early stopping, on the validation loss after each epoch",
    _option("--early-stopping", is_flag=True, help="Stop when the validation loss no longer improves."),
    _option("--early-stop-patience", type=_POSITIVE, default=3, help="Stop after N epochs without improvement."),
    _option("--early-stop-min-delta", type=_AT_LEAST_0, default=0.0,
            help="Smallest decrease that counts as an improvement."),
    _option("--early-stop-restore-best", is_flag=True,
            help="Restore the weights of the best epoch at the end."),
)  # fmt: skip
@_options(
    "Evaluation, printed after each epoch",
    _option("--improvement-threshold", type=click.FloatRange(0.0, 1.0), default=0.01, metavar="X",
            help="Smallest healthy improvement of the validation loss per epoch, as a fraction."),
    _option("--gap-threshold", type=_AT_LEAST_0, default=0.3, metavar="X",
            help="Largest healthy gap between validation and training loss, as a fraction."),
    _option("--plateau-window", type=click.IntRange(min=2), default=3,
            help="Number of epochs without change that count as a plateau."),
    _option("--auto-adjust", is_flag=True,
            help="Lower the learning rate or raise the weight decay when an epoch warning advises it."),
)  # fmt: skip
@_options(
    "Results",
    _option("--result-dir", default="results",
            help="Results go to RESULT_DIR/MODEL_NAME or, if that holds a run, to the next free name."),
    _option("--model-name", default="lm", help="Name of the results directory."),
    _option("--log-interval", type=_POSITIVE, default=100, help="Print a line every N steps."),
    _option("--snapshot-interval", type=click.IntRange(min=0),
            help="Save a snapshot every N steps, in addition to one per epoch; 0: never."),
    _option("--keep-last-n-snapshots", type=_POSITIVE, default=3, help="Number of snapshots to keep."),
    _option("--delete-snapshots-after-training", is_flag=True, help="Delete the snapshots of a run that completes."),
    _option("--tensorboard", is_flag=True, help="Write TensorBoard events."),
    _option("--tensorboard-detail", type=click.Choice(["aggregates", "full"]), default="aggregates",
            help="`full` adds a curve for every metric of every tensor."),
    _option("--resume", is_flag=True,
            help="Continue the newest run, or that of --model-name, bit for bit from its newest snapshot."),
    _option("--overwrite", is_flag=True,
            help="Delete the existing run of this name instead of using the next free name."),
)  # fmt: skip
@click.pass_context
def lm(ctx: click.Context, /, **settings: Any) -> None:
    """Train a small GPT on bytes of text.

    Loss, learning rate, gradient norm and speed are recorded and judged on every step; --weight-monitor adds every
    tensor. Ctrl-C finishes the current step and saves a snapshot. The same command with --resume continues from there.
    Option names accept underscores in place of dashes.

    \b
    Examples:
      forewarn train lm --epochs 1 --max-steps 200 --weight-monitor
      forewarn train lm --dataset notes.txt --epochs 5 --early-stopping --early-stop-restore-best
      forewarn train lm --resume
      torchrun --nproc-per-node 2 -m forewarn train lm --parallel fsdp
    """
    settings["model_name"] = _model_name(ctx, settings)
    for name in ("improvement_threshold", "gap_threshold", "plateau_window"):
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            settings[name] = None  # as in --monitor-config
    options = _Settings(settings | {"rules": loaded_rules(settings["rule_modules"])})
    torch = torch_on(options.device)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        if options.parallel != "off":
            _join(options)
        corpus = _corpus(options)
        trainer = _trainer(options, corpus)
        trainer.train(corpus.batches, corpus.validation, resume=options.resume, overwrite=options.overwrite)
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from error
    if trainer.is_first:
        _conclude(trainer)
    if options.parallel != "off":
        torch.distributed.destroy_process_group()
    if trainer.interrupted:
        ctx.exit(INTERRUPTED)


def _join(options: _Settings) -> None:
    """Join the other processes; raises Failure for options that need a single one."""
    from forewarn.lab.parallel import join

    if options.resume or options.snapshot_interval:
        raise Failure("--parallel saves no snapshots, so --resume and --snapshot-interval need a single process")
    if options.parallel != "ddp" and (options.gradient_monitor or options.amp == "fp16"):
        option = "--gradient-monitor" if options.gradient_monitor else "--amp fp16"
        raise Failure(f"{option} needs whole gradients in each process: use --parallel ddp, or leave it out")
    vars(options)["device"] = join(options.parallel, options.device)


def _model_name(ctx: click.Context, settings: dict[str, Any]) -> str:
    """The name of the results directory. With --resume and no --model-name: the newest one that can be resumed."""
    results = Path(settings["result_dir"])
    directory = results / settings["model_name"]
    if settings["resume"] and ctx.get_parameter_source("model_name") is ParameterSource.DEFAULT:
        directory = newest(directory, lambda path: any((path / "snapshots").glob("step-*.pt")))
    return str(directory.relative_to(results))


class _Settings:
    """The command-line options as attributes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class _Corpus(NamedTuple):
    batches: Any
    validation: Sequence[tuple[Tensor, Tensor]]
    steps_per_epoch: int


def _data_rank(options: _Settings) -> tuple[int, int]:
    """The number of this process among those with a batch of their own, and how many there are."""
    if options.parallel == "off":
        return 0, 1
    from forewarn.lab.parallel import data_rank

    return data_rank(options.parallel)


def _corpus(options: _Settings) -> _Corpus:
    from forewarn.lab.data import TokenBatches, read_text, split, stdlib_text, wikitext

    texts = {"stdlib": stdlib_text, "wikitext": wikitext}
    text = texts[options.dataset]() if options.dataset in texts else read_text(options.dataset)
    training, held_out = split(text)
    rank, num_ranks = _data_rank(options)
    batches = TokenBatches(training, options.batch_size, options.context, options.seed + _SEED_STEP * rank)
    fixed = TokenBatches(held_out, options.batch_size, options.context, seed=0)
    validation = [next(fixed) for _ in range(VALIDATION_BATCHES)]
    tokens_per_step = num_ranks * options.batch_size * options.context * options.accumulation_steps
    return _Corpus(batches, validation, max(1, len(training) // tokens_per_step))


def _trainer(options: _Settings, corpus: _Corpus) -> Trainer:
    import math

    import torch

    from forewarn.config import Config
    from forewarn.lab import (
        Callback,
        EarlyStopping,
        GradientMonitorCallback,
        PostEpochEvaluationCallback,
        Trainer,
        TrainerConfig,
    )
    from forewarn.lab.gpt import GPT, GPTConfig, token_loss

    model = GPT(
        GPTConfig(
            context=options.context,
            depth=options.depth,
            heads=options.heads,
            width=options.width,
            dropout=options.dropout,
            qk_norm=options.qk_norm,
        )
    )
    trained: torch.nn.Module = model
    if options.parallel != "off":
        from forewarn.lab.parallel import parallelized

        trained = parallelized(model, options.parallel, options.device)
        torch.manual_seed(options.seed + _SEED_STEP * _data_rank(options)[0])  # dropout differs between batches
    optimizer = torch.optim.AdamW(trained.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    total = min(corpus.steps_per_epoch * options.epochs, options.max_steps or math.inf)
    warm_up = max(1, int(WARM_UP_SHARE * total))

    def rate(step: int) -> float:
        rising = min(1.0, (step + 1) / warm_up)
        return rising * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / total)))

    same_names = (
        "result_dir", "model_name", "device", "amp", "epochs", "max_steps", "accumulation_steps", "gradient_clip",
        "log_interval", "snapshot_interval", "keep_last_n_snapshots", "weight_monitor_interval",
        "weight_monitor_sample_size", "monitor_topk", "tensorboard", "tensorboard_detail",
        "delete_snapshots_after_training", "log_layers",
    )  # fmt: skip
    declared = ("dropout", "width", "depth", "heads", "context", "batch_size", "weight_decay")
    config = TrainerConfig(
        steps_per_epoch=corpus.steps_per_epoch,
        snapshot_per_epoch=options.parallel == "off",
        enable_weight_monitor=options.weight_monitor,
        monitor=Config.with_rules(options.monitor_config, options.rules)[0] if options.monitor_config else None,
        hyperparameters={name: getattr(options, name) for name in declared},
        **{name: getattr(options, name) for name in same_names},
    )
    stopping = EarlyStopping(options.early_stop_patience, options.early_stop_min_delta, options.early_stop_restore_best)
    evaluation = PostEpochEvaluationCallback(
        None, options.improvement_threshold, options.gap_threshold, options.plateau_window, options.auto_adjust
    )
    callbacks: list[Callback] = [evaluation, stopping] if options.early_stopping else [evaluation]
    if options.gradient_monitor:
        callbacks.append(GradientMonitorCallback(options.log_interval))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return Trainer(trained, optimizer, token_loss, config, callbacks, scheduler=scheduler, rules=options.rules)


def _conclude(trainer: Trainer) -> None:
    """Print how training ended, where the results are, and the next commands."""
    import shlex

    from forewarn.types import in_words

    console = output()
    directory: Path = trainer.config.directory
    how = trainer.stop_reason or "completed"
    assert trainer.monitor is not None
    recorded = trainer.monitor.history.series("train/loss")  # with several processes, that of all of them
    losses = f"loss {in_words(recorded.last if len(recorded) else float(trainer.loss))}"
    if trainer.validation_loss == trainer.validation_loss:
        losses += f", validation loss {in_words(trainer.validation_loss)}"
    console.print(f"{how} after {trainer.step} steps: {losses}")
    console.print(f"Results are in {directory}.")
    if trainer.interrupted:
        console.print("To continue, run the same command with --resume.")
    run = shlex.quote(str(directory / "run"))
    console.print(f"\n  forewarn check {run}\n  forewarn show {run}")
    if trainer.config.tensorboard:
        console.print(f"  tensorboard --logdir {shlex.quote(str(directory / 'tensorboard'))}")

"""The trainer's own lines: where it stands, and which parameters do not move."""

import io

import numpy as np
from rich.console import Console

from forewarn.types import Block, FrozenCause
from forewarn.views.progress import ProgressView


def block(step, name, *values, scopes=("",)):
    return Block(step, 0.0, name, scopes, np.array(values, np.float32))


def lines_of(view_settings, steps, terminal=False):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, markup=False, emoji=False, highlight=False)
    view = ProgressView(console=console, **view_settings)
    for step, blocks in steps:
        view.show(step, blocks, (), ())
    view.close()
    return stream.getvalue()


def reading(step):
    return [
        block(step, "train/loss", 2.45), block(step, "train/loss_ema", 2.42),
        block(step, "train/lr", 3e-4, scopes=("0",)), block(step, "gradient/global_norm", 0.9),
        block(step, "speed/tokens_per_second", 5210.0),
    ]  # fmt: skip


def test_one_line_every_so_many_steps_says_where_training_stands():
    text = lines_of(
        {"total_steps": 1000, "steps_per_epoch": 500, "every": 100}, [(step, reading(step)) for step in range(600)]
    )
    lines = text.splitlines()
    assert len(lines) == 6
    assert lines[0] == "epoch 1/2 | step 100/1000 | loss 2.45 | ema 2.42 | lr 0.0003 | norm 0.9 | tok/s 5210"
    assert lines[5].startswith("epoch 2/2 | step 600/1000")


def test_a_validation_loss_after_the_line_of_its_step_does_not_repeat_it():
    steps = [(0, reading(0)), (0, [block(0, "eval/loss", 2.5)]), (1, reading(1)), (2, reading(2))]
    lines = lines_of({"total_steps": 3, "every": 1}, steps).splitlines()
    assert lines[1] == "step 1/3 | validation 2.5"
    assert [line.split(" | ")[0] for line in lines] == ["step 1/3", "step 1/3", "step 2/3", "step 3/3"]
    alone = lines_of({"total_steps": 3, "every": 9}, [(0, reading(0)), (0, [block(0, "eval/loss", 2.5)])])
    assert alone.startswith("step 1/3 | loss 2.45 | ")
    assert alone.endswith("| validation 2.5\n")


def test_a_run_that_goes_on_says_from_where():
    assert lines_of({"every": 9}, [(15, reading(15)), (16, reading(16))]) == "resuming at step 15\n"


def test_what_is_not_known_is_left_out():
    assert lines_of({"every": 1}, [(0, [block(0, "train/loss", 1.5)])]) == "step 1 | loss 1.5\n"


def test_frozen_parameters_are_listed_with_ratio_and_cause_and_at_most_top_k():
    names = ("a.weight", "b.weight", "c.weight", "moving.weight", "pretrained.weight")
    causes = [
        FrozenCause.ZERO_LR,
        FrozenCause.NO_GRADIENT,
        FrozenCause.ZERO_LR,
        FrozenCause.MOVING,
        FrozenCause.ON_PURPOSE,
    ]
    blocks = [
        block(0, "train/loss", 1.0),
        block(0, "update/frozen_cause", *causes, scopes=names),
        block(0, "update/ratio", 1e-13, np.nan, 0.0, 1e-3, np.nan, scopes=names),
    ]
    text = lines_of({"every": 1, "topk": 2}, [(0, blocks)])
    assert "  frozen: b.weight (update ratio 0): its gradient is None (detached)" in text
    assert "  frozen: c.weight (update ratio 0): the learning rate of its group is 0" in text
    assert "  frozen: 1 more" in text
    assert "moving" not in text
    assert "pretrained" not in text


def test_a_hostile_name_is_shown_literally():
    blocks = [
        block(0, "update/frozen_cause", float(FrozenCause.ZERO_LR), scopes=("[red]\x1b[31mx",)),
        block(0, "update/ratio", 0.0, scopes=("[red]\x1b[31mx",)),
    ]
    text = lines_of({"every": 1}, [(0, blocks)])
    assert "[red]" in text
    assert "\x1b[31m" not in text


def test_a_terminal_has_a_bar_with_the_numbers_beside_it():
    text = lines_of({"total_steps": 10, "every": 100}, [(step, reading(step)) for step in range(10)], terminal=True)
    assert "10/10" in text
    assert "loss 2.45" in text
    assert "tok/s 5210" in text

"""What is shown of several tasks: lines for a person, a collapse in red, a summary that adds up."""

import io

import numpy as np
from rich.console import Console

from forewarn.judge.gradient_tally import GradientTally
from forewarn.judge.headlines import tell
from forewarn.judge.rules import find_rule
from forewarn.types import Alert, AlertState, Block, Finding, Remedy, Severity
from forewarn.views.task_lines import TaskView


def block(name, **values):
    scopes = tuple("" if name == "whole" else name for name in values)
    return Block(0, 0.0, name, scopes, np.array(list(values.values()), np.float32))


def pair(name, value):
    return Block(0, 0.0, name, ("pointer/type",), np.array([value], np.float32))


def blocks(norm, ratio):
    return [
        block("gradient/global_norm", whole=norm), block("gradient/norm", lstm=norm, head=1e-9),
        block("task/share", pointer=0.75, type=0.25), pair("task/ratio", ratio), pair("task/cosine", -0.25),
        block("task/weight", pointer=1.0, type=0.5),
    ]  # fmt: skip


def collapse(state=AlertState.FIRING):
    evidence = {"dominating": "pointer", "starved": "[red]type\x1b[0m", "ratio": 40.0}
    finding = Finding("T102", "pointer/type", 3, Severity.CRITICAL, 40.0, 5.0, evidence)
    raised = Remedy("raise_task_weight", {}, "because", do="Raise the weight of type from 1 to 8")
    told = tell(find_rule("T102").messages, finding)._asdict()
    return Alert("T102", "task-collapse", "pointer/type", Severity.CRITICAL, state, 3, 3, 3, finding, (raised,), **told)


def shown(color=False, **settings):
    stream = io.StringIO()
    console = Console(
        file=stream, width=160, force_terminal=color, color_system="standard" if color else None, markup=False,
        highlight=False, emoji=False,
    )  # fmt: skip
    return TaskView(20, console=console, **settings), stream


def test_epochs_gradients_and_tasks_are_lines():
    view, stream = shown(every=10)
    view.show(0, blocks(2.0, 4.0), [], [])
    for epoch in range(1, 11):
        view.end_epoch(epoch, 1.25, {"pointer": 0.5, "type": 1.0})
    text = stream.getvalue()
    assert "epoch  1/20  loss   1.2500  held out  pointer 0.500  type 1.000" in text
    assert text.count("norm 2, layers from 1e-9 to 2, 1 vanishing, 0 exploding") == 2, "the first and the tenth epoch"
    assert "pointer 75% ━━━━━━━━━━━━━━━━━━╌╌╌╌╌╌ 25% type  ratio 4, uneven, cosine -0.25" in text
    assert "weights pointer 1, type 0.5" in text


def test_a_collapse_is_red_names_both_tasks_and_says_what_to_do():
    view, stream = shown(color=True)
    view.show(3, [], [collapse()], [])
    text = stream.getvalue()
    assert "\x1b[1;31m✖ step 3" in text
    assert "[red]type\\x1b[0m" in text
    assert "Raise the weight of type from 1 to 8" in text


def test_a_collapse_that_is_over_is_told_as_such():
    view, stream = shown()
    view.show(3, [], [collapse()], [])
    view.show(9, [], [collapse(AlertState.RESOLVED)], [])
    assert "✓ step 9  Resolved: task-collapse" in stream.getvalue()


def test_the_summary_is_that_of_all_steps():
    view, stream = shown()
    norms = [1.0, 2.0, 6.0, 3.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    for step, norm in enumerate(norms):
        view.show(step, blocks(norm, 1.5), [], [])
    view.close()
    text = stream.getvalue()
    assert f"gradient norm     mean {np.mean(norms):.3g} ± {np.std(norms, ddof=1):.3g}, highest 6 in step 2" in text
    assert "vanishing layers  head" in text
    assert "exploding layers  none" in text
    assert "task balance      balanced: pointer/type 1.5 over the last 10 checks" in text


def test_too_few_checks_are_too_early_to_tell_and_no_reading_is_no_summary():
    view, stream = shown()
    view.close()
    assert stream.getvalue() == ""
    view.show(0, blocks(1.0, 1.0), [], [])
    view.close()
    assert "task balance      too early to tell (1 of 10 checks): pointer/type 1 so far, balanced" in stream.getvalue()


def test_a_long_list_of_layers_is_cut():
    tally = GradientTally()
    tally.add_layers({f"layer{at}": 99.0 for at in range(6)})
    assert "layer0, layer1, layer2, layer3 and 2 more" in str(tally.summary())

"""`forewarn replay`: a step that went wrong in a real run is run again, and the right place is named."""

import io
import json
import math
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.cli import cli
from forewarn.cli.replay import _tensors
from forewarn.snapshots.tensor_facts import TensorFacts
from forewarn.snapshots.tracing import Place
from forewarn.store.snapshot_folders import snapshots_in
from tests.snapshots import loops
from tests.snapshots.loops import WRONG, nan_in_sample_5, small, train
from tests.test_documentation import ROOT, blocks, files_of
from tests.test_guide import without_numbers

HERE = "tests.snapshots.loops"
MSE = ("--loss", "torch.nn.functional:mse_loss")


def invoked(*arguments):
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)], env={"COLUMNS": "80"})


def replayed(*arguments):
    result = invoked(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


def test_a_nan_in_the_batch_is_named_with_its_sample(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5, settings={"weights": "before"})
    result = invoked(tmp_path / "run", "--model", f"{HERE}:make_small", *MSE)
    assert result.exit_code == 1
    assert "The batch is the cause: NaN already in the input, sample 5" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_without_a_model_the_batch_alone_is_checked(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5)
    (folder,) = snapshots_in(tmp_path / "run")
    result = invoked(folder)
    assert result.exit_code == 1
    assert "NaN already in the input [0], sample 5" in result.output
    assert "--model MODULE:FUNCTION" in result.output


@pytest.mark.parametrize("weights", ["before", "after", "off"])
def test_a_logarithm_of_zero_in_a_middle_module_is_found(tmp_path, weights):
    torch.manual_seed(0)
    model = loops.WithLog()

    def break_it(step, inputs, targets):
        model.log.is_safe = step < WRONG

    train(model, tmp_path / "run", break_it=break_it, settings={"weights": weights})
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_with_log", *MSE)
    (place,) = told["places"]
    assert (place["module"], place["kind"], place["direction"], place["fault"]) == (
        "log", "Log", "forward", "non_finite",
    )  # fmt: skip
    assert place["inputs"][0]["name"] == "x"
    assert place["inputs"][0]["low"] < 0
    assert place["outputs"][0]["num_minus_inf"] > 0
    assert told["batch"] == []
    words = " ".join(told["notes"])
    assert ("already ruined" in words) == (weights == "after")
    assert ("no weights are in the snapshot" in words) == (weights == "off")


def test_what_the_code_of_a_model_does_between_its_modules_is_found(tmp_path):
    with forewarn.watch(
        model := loops.make_own_code(), torch.optim.SGD(model.parameters(), 0.1), tmp_path / "own", views=[],
        config={"snapshots": {"keep_batches": 1}},
    ) as monitor:  # fmt: skip
        loss = model(torch.randn(8, 4)).sum()
        loss.backward()
        monitor.step(loss)
    told = replayed(tmp_path / "own", "--model", f"{HERE}:make_own_code")
    (place,) = told["places"]
    assert (place["module"], place["kind"]) == ("", "OwnCode")
    assert "before it calls last" in place["words"]


def test_an_exploding_layer_is_out_of_scale(tmp_path):
    model = small()

    def break_it(step, inputs, targets):
        if step == WRONG:
            model[3].weight.data *= 1e6

    train(model, tmp_path / "run", break_it=break_it, settings={"weights": "before"})
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_small", *MSE)
    first = told["places"][0]
    assert (first["module"], first["direction"], first["fault"]) == ("3", "forward", "out_of_scale")
    assert "times as large as usual" in first["words"]
    assert told["batch"] == []


def test_a_layer_that_overflows_the_next_one_comes_first(tmp_path):
    model = small()

    def break_it(step, inputs, targets):
        if step == WRONG:
            model[0].weight.data *= 1e30
            model[3].weight.data *= 1e30

    train(model, tmp_path / "run", break_it=break_it, settings={"weights": "before"})
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_small", *MSE)
    assert [(place["module"], place["fault"]) for place in told["places"]] == [("0", "out_of_scale")]
    assert told["cause"].startswith("0 (Linear) goes wrong first, forwards: its output is ")
    assert told["loss"] is None  # infinite


def test_a_gradient_that_is_not_finite_is_found_backwards(tmp_path):
    torch.manual_seed(0)
    model = loops.WithRoot()

    def break_it(step, inputs, targets):
        model.root.is_safe = step < WRONG

    train(model, tmp_path / "run", break_it=break_it, settings={"weights": "before"})
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_with_root", *MSE)
    (place,) = told["places"]
    assert (place["module"], place["direction"], place["fault"]) == ("root", "backward", "non_finite")
    assert math.isfinite(told["loss"])


def test_a_sample_far_out_of_scale_is_probably_the_cause(tmp_path):
    def break_it(step, inputs, targets):
        if step == WRONG:
            inputs[3] *= 1e20
            targets[3] *= 1e20

    train(small(), tmp_path / "run", break_it=break_it, settings={"weights": "before"})
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_small", *MSE)
    assert told["cause"].startswith("Probably the batch is the cause: sample 3 of input is ")
    assert told["batch"][0]["samples"] == [3]


def tagged(path, *, wrong, settings=None):
    """A transformer that gets a dict per batch."""
    model = loops.make_tagger()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config = {"snapshots": {"keep_batches": 1, **(settings or {})}}
    with forewarn.watch(model, optimizer, path, views=[], config=config) as monitor:
        for step in range(4):
            batch = {
                "input_ids": torch.randint(20, (6, 5)), "scale": torch.ones(6), "labels": torch.randint(3, (6, 5)),
            }  # fmt: skip
            if step == 3:
                wrong(batch)
            try:
                loss = model(**batch)["loss"]
            except IndexError as error:
                monitor.snapshot(str(error))
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)


def test_a_label_that_is_no_class_is_named(tmp_path):
    def wrong(batch):
        batch["labels"][4, 1] = 7
        batch["labels"][0, 0] = -100

    tagged(tmp_path / "run", wrong=wrong)
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_tagger")
    assert told["cause"] == (
        "The batch is the cause: label 7 in labels, sample 4, is none of the 3 classes (0 to 2)"
    )  # fmt: skip
    assert "Target 7 is out of bounds" in told["error"]


def test_an_index_outside_an_embedding_names_its_sample_and_the_module_that_raised(tmp_path):
    tagged(tmp_path / "run", wrong=lambda batch: batch["input_ids"][3].fill_(99))
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_tagger")
    assert told["cause"] == (
        "The batch is the cause: index 99 in the input input_ids, sample 3, is outside the table of embedding (0 to 19)"
    )
    (place,) = told["places"]
    assert (place["module"], place["fault"], place["inputs"][0]["high"]) == ("embedding", "error", 99)


def test_arguments_by_name_and_a_causal_mask_are_no_trouble(tmp_path):
    tagged(
        tmp_path / "run", wrong=lambda batch: batch["scale"].__setitem__(2, math.inf), settings={"weights": "before"}
    )
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_tagger")
    assert told["cause"] == "The batch is the cause: ∞ already in the input scale, sample 2"
    with forewarn.watch(
        model := loops.make_tagger(), torch.optim.SGD(model.parameters(), 0.1), tmp_path / "one", views=[],
        config={"snapshots": {"keep_batches": 1}},
    ) as monitor:  # fmt: skip
        model(torch.randint(20, (6, 5)), scale=torch.ones(6), labels=torch.randint(3, (6, 5)))
        monitor.snapshot()
    told = replayed(tmp_path / "one", "--model", f"{HERE}:make_tagger")
    assert (told["cause"], told["places"], told["batch"]) == ("", [], [])


def test_with_the_weights_of_before_and_the_random_states_the_loss_is_the_same(tmp_path):
    model = loops.make_tagger()  # with dropout
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = {"snapshots": {"keep_batches": 2, "weights": "before"}}
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[], config=config) as monitor:
        for _ in range(5):
            loss = model(torch.randint(20, (6, 5)), torch.ones(6), torch.randint(3, (6, 5)))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        monitor.snapshot()
    told = replayed(tmp_path / "run", "--model", f"{HERE}:make_tagger")
    assert told["loss"] == pytest.approx(loss.item(), rel=1e-6)
    other = replayed(tmp_path / "run", "--model", f"{HERE}:make_tagger", "--step", "3")
    assert other["step"] == 3
    assert other["loss"] != told["loss"]


def test_two_models_are_replayed_in_the_order_in_which_they_were_called(tmp_path):
    models = loops.make_gan()
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in models.values()]
    config = {"snapshots": {"keep_batches": 1, "weights": "before"}}
    with forewarn.watch(models, optimizers, tmp_path / "run", views=[], config=config) as monitor:
        for step in range(3):
            if step == 2:
                models["G"][2].weight.data[0] = math.nan
            fake = models["G"](torch.randn(6, 3))
            loss = models["D"](fake).mean() - models["D"](torch.randn(6, 4)).mean()
            loss.backward()
            if step == 2:
                monitor.snapshot("before the update")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss)
    (folder, *_) = snapshots_in(tmp_path / "run")
    told = replayed(folder, "--model", f"{HERE}:make_gan")
    (place,) = told["places"]
    assert (place["module"], place["words"]) == ("G.2", "its weights are not finite")
    assert [one["name"] for one in place["weights"] if one["num_nan"]] == ["weight"]
    assert any("pass the loss function" in note for note in told["notes"])


def test_a_model_that_is_never_called_has_no_batch_and_that_is_said(tmp_path):
    model = small()
    with forewarn.watch(
        model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", views=[],
        config={"snapshots": {"keep_batches": 1}},
    ) as monitor:  # fmt: skip
        for _ in range(2):
            loss = functional.linear(torch.ones(2, 4), model[0].weight).sum()
            loss.backward()
            monitor.step(loss)
        monitor.snapshot()
    result = invoked(tmp_path / "run", "--model", f"{HERE}:make_small")
    assert result.exit_code == 0
    assert "no forward pass in training mode was seen" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--model", "nowhere:make"], "cannot be imported: No module named 'nowhere'", 3),
        (["--model", f"{HERE}:nothing"], "has no attribute 'nothing'", 3),
        (["--model", "train"], "must be named as module:function", 64),
        (["--model", f"{HERE}:fails"], "cannot be built: RuntimeError: no such dataset", 3),
        (["--model", f"{HERE}:returns_nothing"], "must return a torch.nn.Module", 3),
        (["--model", f"{HERE}:make_small", "--loss", f"{HERE}:not_a_number"], "must return a scalar tensor", 3),
        (["--model", f"{HERE}:make_tagger"], "holds no weight of this model", 3),
        (["--model", f"{HERE}:make_small", "--weights", "missing.safetensors"], "cannot be read", 3),
        (["--step", "3"], "has no batch of step 3; it has those of these steps: 12", 3),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_sentence(arguments, words, code, broken):
    result = CliRunner().invoke(cli, ["replay", str(broken), *arguments], standalone_mode=True)
    assert words in " ".join(result.output.split())
    assert result.exit_code == (2 if code == 64 else code)  # `main` turns click's code for usage into 64


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    path = tmp_path_factory.mktemp("broken") / "run"
    train(small(), path, break_it=nan_in_sample_5, settings={"weights": "before"})
    return path


def test_a_checkpoint_of_torch_can_replace_the_weights(tmp_path, broken):
    torch.save(
        {"model": {f"module.{name}": value for name, value in small().state_dict().items()}}, tmp_path / "last.pt"
    )
    told = replayed(broken, "--model", f"{HERE}:make_small", *MSE, "--weights", tmp_path / "last.pt")
    assert told["cause"].startswith("The batch is the cause")
    torch.save([nn.Linear(1, 1)], tmp_path / "pickled.pt")
    result = invoked(broken, "--model", f"{HERE}:make_small", "--weights", tmp_path / "pickled.pt")
    assert result.exit_code == 3
    assert "cannot be read as weights" in " ".join(result.output.split())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": 3}', '{"steps": [{"step": 12}]}', "[" * 100_000])
@pytest.mark.parametrize("name", ["snapshot.json", "batch.json", "random.json"])
def test_a_damaged_snapshot_is_refused_in_one_sentence(name, content, broken, tmp_path):
    copy = Path(shutil.copytree(broken / "snapshots" / "step-000012", tmp_path / "step-000012"))
    (copy / name).write_text(content)
    result = invoked(copy)
    assert result.exit_code == 3
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_of_many_inputs_those_that_are_not_finite_are_shown():
    sound, wrong = TensorFacts("x", "float32", (2,)), TensorFacts("y", "float32", (2,), num_nan=1)
    place = Place("", "Model", "forward", "non_finite", "", (*[sound] * 8, wrong), (), ())
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_tensors(place))
    shown = console.export_text()
    assert "1 NaN" in shown
    assert "in  and 3 more" in shown


def test_names_from_a_snapshot_are_escaped(broken, tmp_path):
    copy = Path(shutil.copytree(broken / "snapshots" / "step-000012", tmp_path / "step-000012"))
    about = json.loads((copy / "snapshot.json").read_text())
    about |= {"reason": "\x1b[31mred", "notes": ["\x1b]0;title\x07"], "alert": None}
    (copy / "snapshot.json").write_text(json.dumps(about))
    result = invoked(copy)
    assert "\\x1b[31mred" in result.output
    assert "\x1b" not in result.output
    assert "\x07" not in result.output


def test_a_run_without_snapshots_says_so(tmp_path, watch):
    model = small()
    watch(model, torch.optim.SGD(model.parameters(), 0.1), run=tmp_path / "run").close()
    result = invoked(tmp_path / "run")
    assert result.exit_code == 3
    assert "has no snapshots" in result.output


def test_check_and_report_show_the_command_that_replays(broken):
    command = f"forewarn replay {broken / 'snapshots' / 'step-000012'} --model MODULE:FUNCTION"
    checked = CliRunner().invoke(cli, ["check", str(broken)], env={"COLUMNS": "300"})
    assert command in checked.output
    plain = json.loads(CliRunner().invoke(cli, ["check", str(broken), "--json"]).output)
    assert plain["snapshots"] == [str(broken / "snapshots" / "step-000012")]
    report = json.loads(CliRunner().invoke(cli, ["report", str(broken), "--json"]).output)
    assert report["environment"]["debug snapshot"] == command
    assert CliRunner().invoke(cli, ["ls", str(broken.parent)]).exit_code == 0


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch):
    page = ROOT / "docs" / "snapshots.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    Path("train.py").write_text(files_of(page)["train.py"])
    runpy.run_path("train.py", run_name="__main__")
    (command,) = blocks(page, "bash")
    result = invoked(*shlex.split(command)[2:])
    (shown,) = blocks(page, "text")
    assert without_numbers(result.output) == without_numbers(shown)
    assert "sample 17" in result.output

import pytest
import torch

from forewarn.lab.bench.workloads import WORKLOADS, find_workload


@pytest.mark.parametrize(
    ("name", "millions", "tensors"),
    [
        ("gpt6", 4.8, 76), ("gpt12", 24.6, 148), ("tiny", 0.276, 1000), ("modules", 0.076, 1000), ("resnet", 0.150, 53),
        ("encoder", 21.3, 144), ("mlp", 0.00692, 6),
    ],
)  # fmt: skip
def test_our_workloads_have_the_shape_that_their_figures_are_quoted_for(name, millions, tensors):
    model = WORKLOADS[name].build().model
    assert len(list(model.parameters())) == tensors
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1e6 * millions, rel=0.01)


def test_they_train_and_are_the_same_each_time_they_are_built():
    losses = []
    for _ in range(2):
        training = WORKLOADS["tiny"].build()
        losses.append(training.loss(training.model, training.make_batch()))
    assert losses[0].requires_grad
    assert torch.equal(losses[0], losses[1])


def test_a_workload_of_your_own_is_a_function_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_workload.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(2, 1), lambda: torch.ones(3, 2), lambda model, batch: model(batch).mean()\n"
        "def wrong():\n"
        "    return 5\n"
        "def raising():\n"
        "    return {}['data']\n"
    )
    training = find_workload("own_workload:make").build()
    training.loss(training.model, training.make_batch()).backward()
    with pytest.raises(ValueError, match="returned a int; expected a tuple"):
        find_workload("own_workload:wrong").build()
    with pytest.raises(ValueError, match="cannot be made: KeyError: 'data'"):
        find_workload("own_workload:raising").build()
    with pytest.raises(ValueError, match="cannot be imported"):
        find_workload("own_workload:nothing")
    with pytest.raises(ValueError, match="cannot be imported"):
        find_workload("no_such_module_here:make")
    with pytest.raises(ValueError, match="there is no workload 'gpt7'"):
        find_workload("gpt7")

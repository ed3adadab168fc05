"""Metrics of one's own: keys, regular expressions, aggregation, built-in names, and failures."""

import copy
import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn import ModuleMonitor

KINDS = ("activation", "activation_difference", "parameter", "parameter_difference", "gradient")


def monitored(model, **settings):
    monitor = ModuleMonitor(lambda step: True, **settings)
    monitor.set_module(model)
    return monitor


def one_step(monitor, model, *inputs):
    """One step with a forward and a backward for each input; its metrics."""
    monitor.begin_step(0)
    for each in inputs:
        model(each).square().mean().backward()
        monitor.after_micro_batch()
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    return monitor.get_step_metrics()


def test_values_are_those_of_a_forward_by_hand(small):
    model, _ = small
    monitor = monitored(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("row_norm", lambda x: x.norm(dim=-1))
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.add_gradient_metric("sum", lambda g: g.sum())
    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    found = one_step(monitor, model, *inputs)
    weights = {name: each.detach().double().numpy() for name, each in model.named_parameters()}
    hidden = [x.double().numpy() @ weights["0.weight"].T + weights["0.bias"] for x in inputs]
    assert found["activation/0/mean"] == pytest.approx(np.mean([h.mean() for h in hidden]), rel=1e-5)
    rows = np.concatenate([np.linalg.norm(h, axis=-1) for h in hidden])
    assert found["activation/0/row_norm"] == pytest.approx(rows.mean(), rel=1e-5)  # every element counts alike
    out = [np.tanh(h) @ weights["2.weight"].T + weights["2.bias"] for h in hidden]
    assert found["activation/[root module]/mean"] == pytest.approx(np.mean([o.mean() for o in out]), rel=1e-5)
    assert found["parameter/0.weight/norm"] == pytest.approx(np.linalg.norm(weights["0.weight"]), rel=1e-5)
    by_hand = sum((2 * o / o.size).sum() for o in out)  # d mean(o²) / d bias
    assert found["gradient/2.bias/sum"] == pytest.approx(by_hand, rel=1e-5)
    assert set(found) == {
        *(
            f"activation/{module}/{metric}"
            for module in ("0", "1", "2", "[root module]")
            for metric in ("mean", "row_norm")
        ),
        *(f"parameter/{name}/norm" for name in weights),
        *(f"gradient/{name}/sum" for name in weights),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_used_twice_is_an_error_within_its_kind_only(kind):
    monitor = ModuleMonitor()
    add = getattr(monitor, f"add_{kind}_metric")
    add("mean", lambda *x: x[0].mean())
    with pytest.raises(ValueError, match="already exists"):
        add("mean", lambda *x: x[0].mean())
    other = monitor.add_parameter_metric if kind != "parameter" else monitor.add_gradient_metric
    other("mean", lambda x: x.mean())


def test_a_regex_is_matched_from_the_start_of_the_name(small):
    model, _ = small
    monitor = monitored(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(), r"0|2")
    monitor.add_gradient_metric("norm", lambda x: x.norm(), r".*bias")
    assert set(one_step(monitor, model, torch.ones(2, 4))) == {
        "activation/0/mean", "activation/2/mean", "gradient/0.bias/norm", "gradient/2.bias/norm",
    }  # fmt: skip


def test_excluded_modules_get_no_hook_but_their_parameters_count(small):
    model, _ = small
    monitor = monitored(model, excluded_modules_regex=r"0|\[root")
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.begin_step(0)
    assert not model[0]._forward_hooks
    assert model[1]._forward_hooks
    monitor.end_step()
    found = one_step(monitor, model, torch.ones(2, 4))
    assert {key for key in found if key.startswith("activation")} == {"activation/1/mean", "activation/2/mean"}
    assert "parameter/0.weight/norm" in found


def test_an_aggregation_sees_all_elements_and_a_mapping_becomes_suffixes(small):
    model, _ = small
    monitor = monitored(model)
    monitor.add_activation_metric("max", lambda x: x.amax(dim=-1), "0", lambda values: values.max())
    monitor.add_activation_metric(
        "all", lambda x: x, "0", lambda v: {"[std]": v.std().item(), "": v.mean(), "[n]": 1.0}
    )
    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    found = one_step(monitor, model, *inputs)
    hidden = np.concatenate([model[0](x).detach().numpy() for x in inputs])
    assert found["activation/0/max"] == pytest.approx(hidden.max(), rel=1e-6)
    assert found["activation/0/all[std]"] == pytest.approx(hidden.std(ddof=1), rel=1e-5)
    assert found["activation/0/all"] == pytest.approx(hidden.mean(), rel=1e-5)
    assert found["activation/0/all[n]"] == 1


BY_HAND = {
    "norm": np.linalg.norm, "mean": np.mean, "std": np.std, "min": np.min, "max": np.max,
    "zero_fraction": lambda x: np.mean(x == 0), "nonfinite": lambda x: np.sum(~np.isfinite(x)),
    "abs_max": lambda x: np.abs(x).max(), "rms": lambda x: np.sqrt(np.mean(np.square(x))),
}  # fmt: skip


@pytest.mark.parametrize("quantity", BY_HAND)
def test_built_in_metrics_agree_with_numpy_for_every_kind_of_tensor(quantity):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2))
    reference = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2))
    monitor = monitored(model)
    monitor.set_reference_module(reference)
    for kind in KINDS:
        getattr(monitor, f"add_{kind}_metric")(quantity)
    monitor.add_gradient_metric("another name", quantity)
    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    monitor.begin_step(0)
    for each in inputs:
        reference(each)
        model(each).square().mean().backward()
        monitor.after_micro_batch()
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    found = monitor.get_step_metrics()

    def by_hand(tensor):
        return float(BY_HAND[quantity](tensor.detach().double().numpy().ravel()))

    expected = {"activation/1": [by_hand(model[:2](x)) for x in inputs]}
    expected["activation_difference/1"] = [by_hand(model[:2](x) - reference[:2](x)) for x in inputs]
    expected["parameter/2.weight"] = [by_hand(model[2].weight)]
    expected["parameter_difference/2.weight"] = [by_hand(model[2].weight - reference[2].weight)]
    expected["gradient/0.weight"] = [by_hand(model[0].weight.grad)]
    for key, values in expected.items():
        assert found[f"{key}/{quantity}"] == pytest.approx(np.mean(values), rel=1e-5, abs=1e-7), key
    assert found["gradient/0.weight/another name"] == found[f"gradient/0.weight/{quantity}"]


def test_a_built_in_metric_may_have_an_aggregation(small):
    model, _ = small
    monitor = monitored(model)
    monitor.add_activation_metric("max", metric_regex="0", metric_aggregation_fn=lambda values: values.max())
    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    found = one_step(monitor, model, *inputs)
    assert found["activation/0/max"] == pytest.approx(model[0](torch.cat(inputs)).max().item(), rel=1e-6)


def test_an_unknown_built_in_name_or_regex_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"'nrom' is not a built-in metric; give a function, or one of norm, mean"):
        ModuleMonitor().add_gradient_metric("nrom")
    with pytest.raises(ValueError, match="not a regular expression"):
        ModuleMonitor().add_gradient_metric("norm", metric_regex="(")
    with pytest.raises(ValueError, match="reduce='median' must be one of l2, mean, sum, max"):
        ModuleMonitor().add_gradient_metric("norm", reduce="median")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Structured(nn.Module):
    """Returns what its `make` makes of a linear layer's output."""

    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(self.layer(x))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: (x, 2 * x), ["[0]", "[1]"]),
        (lambda x: [x, None, "text", {"a": x}], ["[0]", "[3][a]"]),
        (lambda x: {"hidden": x, "mask": x > 0}, ["[hidden]"]),
        (lambda x: Output(x), ["[logits]"]),
        (lambda x: Output(x, (x, x.argmax())), ["[logits]", "[loss][0]"]),
    ],
)
def test_each_tensor_of_a_structured_output_is_monitored(make, names):
    model = Structured(make)
    monitor = monitored(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(), r"\[root")
    monitor.begin_step(0)
    model(torch.ones(2, 4))
    monitor.end_step()
    found = monitor.get_step_metrics()
    assert set(found) == {f"activation/[root module]{name}/mean" for name in names}
    true = model.layer(torch.ones(2, 4)).mean().item()
    assert found[f"activation/[root module]{names[0]}/mean"] == pytest.approx(true)


def test_a_failing_metric_is_named_once_and_switched_off_and_training_goes_on(small, caplog):
    model, optimizer = small

    def broken(x):
        raise ZeroDivisionError("oh no")

    monitor = monitored(model)
    monitor.add_activation_metric("broken", broken)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_gradient_metric("vector", lambda g: g.flatten())
    monitor.add_parameter_metric("text", lambda g: "many")
    monitor.add_parameter_metric("phase", lambda g: torch.fft.fft(g.flatten())[1])
    monitor.add_activation_metric("bad sum", lambda x: x, "0", lambda values: values.no_such_thing)
    with caplog.at_level(logging.WARNING, logger="forewarn"):
        for step in range(3):
            monitor.begin_step(step)
            model(torch.ones(2, 4)).sum().backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            optimizer.step()
            monitor.end_step()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 5, told
    assert told[0].startswith("activation metric 'broken' failed on 0: ZeroDivisionError: oh no; it is switched off")
    assert "gradient metric 'vector' failed on 0.weight" in told[1]
    assert "expected one number" in told[1]
    assert "parameter metric 'text' failed on 0.weight: TypeError: it returned str" in told[2]
    assert "parameter metric 'phase' failed on 0.weight: TypeError: it returned a tensor of torch.complex64" in told[3]
    assert "the aggregation function of activation/0/bad sum failed" in told[4]
    assert set(monitor.get_step_metrics()) == {f"activation/{name}/mean" for name in ("0", "1", "2", "[root module]")}


def test_strict_lets_a_failing_metric_raise(small):
    model, _ = small
    monitor = monitored(model, strict=True)
    monitor.add_activation_metric("broken", lambda x: x.no_such_thing)
    monitor.begin_step(0)
    with pytest.raises(RuntimeError, match="activation metric 'broken' failed on 0: AttributeError"):
        model(torch.ones(2, 4))


def test_an_activation_that_the_next_module_changes_in_place_is_read_before(small):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
    monitor = monitored(model)
    monitor.add_activation_metric("first", lambda x: x[0, 0], "0")
    monitor.add_activation_metric("all", lambda x: x, "0", lambda values: values.min())
    x = torch.randn(6, 4)
    with torch.no_grad():
        true = model[0](x)
    found = one_step(monitor, model, x)
    assert found["activation/0/first"] == pytest.approx(float(true[0, 0]))
    assert found["activation/0/all"] == pytest.approx(float(true.min()))


def test_names_of_a_compiled_model_are_clean_in_keys_and_in_the_regex(small, caplog):
    model, _ = small
    compiled = torch.compile(model, backend="eager")
    monitor = monitored(compiled)
    monitor.add_gradient_metric("norm", lambda g: g.norm(), r"0\.")
    monitor.add_activation_metric("mean", lambda x: x.mean(), r"0")
    monitor.begin_step(0)
    compiled(torch.ones(2, 4)).sum().backward()
    monitor.monitor_gradients()
    with caplog.at_level(logging.WARNING, logger="forewarn"):
        monitor.end_step()
    assert set(monitor.get_step_metrics()) == {"gradient/0.weight/norm", "gradient/0.bias/norm"}
    assert "on monitored steps call the model that was not compiled" in caplog.text
    monitor.begin_step(1)
    model(torch.ones(2, 4))
    monitor.end_step()
    assert set(monitor.get_step_metrics()) == {"activation/0/mean"}


def test_default_names_are_free_of_wrappers():
    name = forewarn.measure.module_outputs.default_format_module_name_fn
    assert name("") == name("_orig_mod") == name("_forward_module") == name("_fsdp_wrapped_module") == "[root module]"
    assert name("_orig_mod.blocks.0._fsdp_wrapped_module.attn") == "blocks.0.attn"


def test_what_checkpointing_computes_again_is_not_counted_twice():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False).sum()

    model, calls = Model(), []
    monitor = monitored(model)
    monitor.add_activation_metric("mean", lambda x: calls.append(x) or x.mean(), "layer")
    monitor.begin_step(0)
    model(torch.ones(2, 4)).backward()
    monitor.end_step()
    assert len(calls) == 1


def test_a_built_in_difference_that_fails_is_named_and_switched_off(caplog):
    model = nn.Linear(4, 2)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(copy.deepcopy(model))
    monitor.add_activation_difference_metric("norm")
    monitor.begin_step(0)
    monitor.reference_module(torch.randn(2, 4))
    model(torch.randn(5, 4))
    monitor.end_step()
    assert "norm" in caplog.text
    assert "switched off" in caplog.text
    monitor.close()


def test_built_in_names_work_in_inference_mode(small):
    model, _ = small
    monitor = monitored(model)
    monitor.add_activation_metric("mean")
    monitor.begin_step(0)
    with torch.inference_mode():
        output = model(torch.ones(3, 4))
    monitor.after_micro_batch()
    monitor.end_step()
    means = [value for key, value in monitor.get_step_metrics().items() if "/2/" in key or key.split("/")[1] == "2"]
    assert means == [pytest.approx(output.mean().item())]

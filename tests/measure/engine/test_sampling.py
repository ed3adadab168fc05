import subprocess
import sys

import numpy as np
import pytest
import torch

from forewarn.measure.engine import UpdateSampler, native, sample_indices
from forewarn.measure.engine.sampling import fnv1a


def test_the_hash_is_the_published_one():
    # Test vectors of the FNV reference page.
    assert fnv1a("") == 0xCBF29CE484222325
    assert fnv1a("a") == 0xAF63DC4C8601EC8C
    assert fnv1a("foobar") == 0x85944171F73967E8


def test_places_are_fixed_by_the_name_alone_in_every_process():
    code = "from forewarn.measure import engine; print(engine.sample_indices('blocks.0.weight', 10**6, 5).tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(sample_indices("blocks.0.weight", 10**6, 5).tolist())
    assert sample_indices("a", 10**6, 64).tolist() != sample_indices("b", 10**6, 64).tolist()


def test_places_lie_inside_and_spread_evenly():
    places = sample_indices("w", 1_000_000, 4096)
    assert places.dtype == np.int32
    assert places.min() >= 0
    assert places.max() < 1_000_000
    counts, _ = np.histogram(places, bins=8, range=(0, 1_000_000))
    assert abs(counts - 512).max() < 5 * np.sqrt(512)


def test_a_small_tensor_is_taken_whole():
    assert sample_indices("w", 5, 1024).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_whole_sample_measures_the_exact_update(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 30, generator=generator).to(dtype)
    after = (weight.float() + 0.1 * torch.randn(20, 30, generator=generator)).to(dtype)
    sampler = UpdateSampler(["w"], 1024)
    sampler.remember([weight])
    order, sums = sampler.moved([after])
    assert list(order) == [0]
    step = (after.double() - weight.double()).numpy()
    np.testing.assert_allclose(
        np.asarray(sums[0])[0], [(step**2).sum(), (weight.double().numpy() ** 2).sum()], rtol=1e-12
    )


def test_a_sample_of_1024_is_close_to_the_exact_ratio():
    generator = torch.Generator().manual_seed(0)
    names = [f"layer{at}" for at in range(40)]
    weights = [torch.randn(200, 200, generator=generator) for _ in names]
    after = [weight + 0.01 * torch.randn(200, 200, generator=generator) for weight in weights]
    sampler = UpdateSampler(names, 1024)
    sampler.remember(weights)
    _, sums = sampler.moved(after)
    found = np.asarray(sums[0])
    sampled = np.sqrt(found[:, 0] / found[:, 1])
    exact = np.array([((b - a).norm() / a.norm()).item() for a, b in zip(weights, after, strict=True)])
    assert np.quantile(abs(sampled / exact - 1), 0.95) < 0.08


def test_mixed_types_and_layouts_keep_their_order():
    tensors = [
        torch.zeros(3),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(4, 5).t(),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(6, 6)[::2, ::3],
    ]
    sampler = UpdateSampler([f"t{at}" for at in range(len(tensors))], 7)
    sampler.remember(tensors)
    for at, tensor in enumerate(tensors):
        tensor.add_(at + 1)
    order, sums = sampler.moved(tensors)
    step = np.empty(len(tensors))
    step[order] = np.concatenate([np.asarray(part) for part in sums])[:, 0]
    sizes = [3, 2, 7, 1, 0, 2, 7, 6]
    np.testing.assert_allclose(step, [size * (at + 1) ** 2 for at, size in enumerate(sizes)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["native", "torch"])
def test_memory_is_four_bytes_a_place_and_that_of_the_values_while_they_are_remembered(dtype):
    sampler = UpdateSampler(["a", "b"], 1024)
    weights = [torch.zeros(100_000, dtype=dtype), torch.zeros(50_000, dtype=dtype)]
    for _ in range(3):
        sampler.remember(weights)
    assert sampler.num_bytes == 2 * 1024 * (4 + 4)
    sampler.forget()
    assert sampler.num_bytes == 2 * 1024 * 4


def test_a_tensor_that_becomes_another_is_not_compared():
    sampler = UpdateSampler(["w"], 1024)
    sampler.remember([torch.zeros(100)])
    assert sampler.moved([torch.zeros(50)]) == ([], [])
    sampler.remember([torch.zeros(50)])
    order, _ = sampler.moved([torch.ones(50)])
    assert list(order) == [0]


@pytest.fixture(params=["native", "torch"])
def backend(request, monkeypatch):
    """The sampler with and without the native library."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    return request.param


def test_both_backends_measure_the_same(backend):
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(60, 70, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    sampler = UpdateSampler(["a", "b", "c"], 256)
    sampler.remember(weights)
    after = [weight * 1.5 for weight in weights]
    order, sums = sampler.moved(after)
    found = np.empty((3, 2))
    found[order] = np.concatenate([np.asarray(part) for part in sums])
    for at, name in enumerate("abc"):
        places = sample_indices(name, 4200, 256).astype(int)
        old = weights[at].double().numpy().ravel()[places]
        new = after[at].double().numpy().ravel()[places]
        np.testing.assert_allclose(found[at], [((new - old) ** 2).sum(), (old**2).sum()], rtol=1e-12)

import ctypes
import logging
import math
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from forewarn.measure.engine import ALL_BLOCKS, UpdateSampler, dispatch, measure, native, sample_indices
from forewarn.measure.engine.native import library
from tests.measure.engine.code_paths import over_paths

ROOT = Path(__file__).parents[3]
BLOCK = 4096
CPU_INFO = Path("/proc/cpuinfo")

pytestmark = pytest.mark.skipif(
    not native.available() and not shutil.which("cc"), reason="there is no C compiler to build the library with"
)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_library_is_there_wherever_there_is_a_compiler():
    assert native.available(), native.why_not()
    assert native.why_not() == ""
    assert native.paths()[-1] == "portable"


@pytest.mark.skipif(not CPU_INFO.exists(), reason="only Linux tells the instructions of a processor in a file")
def test_the_best_instructions_of_this_processor_are_used_not_emulated():
    flags = set(CPU_INFO.read_text().split())
    if "avx512f" in flags and "avx512bw" in flags:
        best = "avx512"
    else:
        best = "avx2" if {"avx2", "fma", "f16c"} <= flags else "portable"
    assert native.paths()[0] == best
    assert library.path_number(None) == library.path_number(best)


# ---- threads, code paths, sampled histograms ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_results_are_the_same_bits_for_any_number_of_threads_on_any_code_path(dtype):
    tensors = [random(n, dtype=dtype, seed=n) for n in (1_800_007, 3, 0, 262_144, 262_145, 50_001)]
    tensors[0][[5, 700_000]] = float("nan")
    tensors += [torch.tensor([-0.0, 0.0], dtype=dtype).repeat(1000), torch.tensor([-0.0], dtype=dtype)]
    first, *others = [
        native.measure(tensors, histogram_blocks=ALL_BLOCKS, threads=threads, path=path)
        for path in native.paths()
        for threads in (1, 2, 3, 1000)
    ]
    assert not np.signbit(first[0][-2:, 3:5]).any()
    for rows, histograms, covered in others:
        assert rows.tobytes() == first[0].tobytes()
        assert histograms.tobytes() == first[1].tobytes()
        assert covered.tobytes() == first[2].tobytes()


def test_a_code_path_that_the_processor_lacks_is_refused_by_name():
    refused = pytest.raises(ValueError, match=f"no code path 'neon'; it has {', '.join(native.paths())}")
    places, offsets = drawn([random(10)], 4)
    with refused:
        native.measure([random(10)], path="neon")
    with refused:
        native.gather_diff([random(10)], places, offsets, native.gather([random(10)], places, offsets), path="neon")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_tensor_by_the_short_way_has_the_same_bits(dtype, monkeypatch):
    tensors = [random(n, dtype=dtype, seed=n) for n in (1_800_007, 3, 1, 50_001)]
    tensors[0][5] = float("nan")
    tensors += [tensors[3][:50_000].reshape(200, 250).t(), torch.empty(0, dtype=dtype), nn.Parameter(tensors[1])]
    for tensor in tensors:
        rows, _, _ = native.measure([tensor])
        assert native.measure_one(tensor).tobytes() == rows.tobytes()
        found = measure([tensor])
        assert (list(found.order), found.histograms) == ([0], ())
        assert found.rows[0].tobytes() == rows.tobytes()


def test_a_library_that_fails_on_one_tensor_is_not_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_broken", set())
    monkeypatch.setattr(native, "measure_one", lambda tensor: 1 / 0)
    tensor = random(1000)
    with caplog.at_level(logging.ERROR, logger="forewarn"):
        found = [measure([tensor]), measure([tensor])]
    assert len(caplog.records) == 1
    expected = native.measure([tensor])[0]
    for each in found:
        assert np.asarray(each.rows[0]) == pytest.approx(expected, rel=1e-5)


def test_calls_from_several_threads_at_once_do_not_disturb_each_other():
    tensors = [random(n, seed=n) for n in (700_001, 600_001, 13)]
    alone = native.measure(tensors, histogram_blocks=40, threads=1)
    found = []

    def call():
        for _ in range(20):
            found.append(native.measure(tensors, histogram_blocks=40, threads=2))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 60
    assert all(part.tobytes() == same.tobytes() for each in found for part, same in zip(each, alone, strict=True))


def test_other_python_threads_run_while_it_reads():
    tensors = [random(4_000_000)]
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody is asked to let go of the interpreter: who runs meanwhile was let in
    try:
        ticker.start()
        before = ticks[0]
        for _ in range(20):
            native.measure(tensors, histogram_blocks=ALL_BLOCKS, threads=1)
        during = ticks[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        ticker.join()
    assert during > 0


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(st.integers(0, 100_003), st.integers(520_000, 530_000)),
    st.integers(1, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_sampled_histogram_counts_evenly_spaced_blocks_from_the_first_on(size, most, dtype):
    tensor = random(size, dtype=dtype, seed=size)
    tensor[::5] = 0.0
    rows, histograms, covered = native.measure([tensor], histogram_blocks=most)
    blocks = tensor.split(BLOCK)
    kept = torch.cat(blocks[:: min(math.ceil(len(blocks) / most), 16)])
    assert covered.tolist() == [kept.numel()]
    np.testing.assert_array_equal(histograms, native.measure([kept], histogram_blocks=ALL_BLOCKS)[1])
    np.testing.assert_array_equal(rows, native.measure([tensor])[0])


def test_without_a_histogram_there_is_none():
    _, histograms, covered = native.measure([random(5)])
    assert histograms is None
    assert covered is None
    with pytest.raises(ValueError, match="0 for none, not -1"):
        native.measure([random(5)], histogram_blocks=-1)


def test_no_tensors_are_no_rows():
    rows, histograms, _ = native.measure([], histogram_blocks=ALL_BLOCKS)
    assert rows.shape == (0, 7)
    assert histograms.shape == (0, 2, 64)


def test_a_mode_that_flushes_denormal_numbers_changes_nothing_and_is_left_on():
    tensors = [torch.tensor([1e-40, -1e-42, 0.0, 1.0] * 10), torch.tensor([5e-324, 0.0], dtype=torch.float64)]
    halves = torch.arange(1, 40, dtype=torch.int16).view(torch.float16)
    honest = {
        path: native.measure([*tensors, halves], histogram_blocks=ALL_BLOCKS, path=path) for path in native.paths()
    }
    assert honest["portable"][0][:, 5].tolist() == [10, 1, 0]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        for path, wanted in honest.items():
            found = native.measure([*tensors, halves], histogram_blocks=ALL_BLOCKS, path=path)
            assert all(part.tobytes() == same.tobytes() for part, same in zip(found, wanted, strict=True))
        assert (torch.tensor([1e-40]) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)


# ---- what it can read, and what it asks of torch ----


class Wrapper(torch.Tensor):
    """A subclass whose numbers are in another tensor, as those of a DTensor are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class PlainSubclass(nn.Parameter):
    """A parameter with a name of its own and nothing else."""


READABLE = {
    "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "a parameter subclass": lambda: PlainSubclass(torch.ones(3)),
    "a buffer": lambda: nn.Buffer(torch.ones(3)),
    "no dimension": lambda: torch.tensor(1.0),
    "empty": lambda: torch.empty(3, 0),
    "transposed": lambda: torch.ones(3, 4).t(),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a slice of rows": lambda: torch.ones(9, 3)[2:5],
    "double": lambda: torch.ones(3, dtype=torch.float64),
    "half": lambda: torch.ones(3, dtype=torch.float16),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "a dimension of one with an odd stride": lambda: torch.ones(8).as_strided((4, 1), (1, 77)),
}
UNREADABLE = {
    "every second element": lambda: torch.ones(9)[::2],
    "expanded": lambda: torch.ones(1).expand(5),
    "overlapping": lambda: torch.ones(9).as_strided((3, 3), (1, 1)),
    "integers": lambda: torch.arange(3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "lazily negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "meta": lambda: torch.ones(3, device="meta"),
    "zeros without memory": lambda: torch._efficientzerotensor((3,)),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "a wrapper": lambda: Wrapper(torch.ones(3)),
    "not yet initialized": lambda: nn.UninitializedParameter(),
    "a jagged one": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("make", READABLE.values(), ids=READABLE.keys())
def test_supports_what_is_dense_in_host_memory(make):
    tensor = make()
    assert native.supports(tensor)
    assert native.described([torch.ones(2), tensor]) is not None
    assert native.measure([tensor])[0][0, :2].tolist() == [tensor.numel(), tensor.numel()]


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_does_not_support_what_its_memory_does_not_say(make):
    assert not native.supports(make())
    assert native.described([torch.ones(2), make()]) is None


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize, torch.func.grad])
def test_does_not_support_tensors_within_a_functorch_transform(transform):
    seen = []

    def function(x):
        seen.append(native.supports(x))
        return x.sum()

    transform(function)(torch.ones(2))
    assert seen == [False]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_torch_operation_runs():
    tensors = [nn.Parameter(random(50, 60)), random(8, 9).t(), random(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    places, offsets = drawn(tensors, 16)
    with Counting() as counting:
        assert all(map(native.supports, tensors))
        native.measure(tensors, histogram_blocks=ALL_BLOCKS)
        before = native.gather(tensors, places, offsets)
        native.gather_diff(tensors, places, offsets, before)
    assert counting.operations == []


# ---- tensors that stay ----


def test_weights_that_stay_where_they_are_are_looked_at_once():
    weights = native.Standing([nn.Parameter(random(4, 5)), nn.Parameter(random(7))])
    first = native.described(weights)
    weights[0].data.mul_(2)
    assert native.described(weights) is first


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.to(torch.bfloat16),
        lambda weight: weight.clone(),
        lambda weight: weight[:2],
        lambda weight: torch.cat([weight, weight]),
        lambda weight: weight.t(),
    ],
    ids=["another dtype", "another place", "a part of it", "more", "transposed"],
)
def test_weights_that_have_become_others_are_looked_at_again(change):
    weight = nn.Parameter(random(4, 5))
    weights = native.Standing([nn.Parameter(random(3)), weight])
    native.described(weights)
    weight.data = change(weight.data)
    rows, _, _ = native.measure(native.described(weights))
    expected = weight.detach().double()
    np.testing.assert_allclose(rows[1, :3], [weight.numel(), expected.sum(), expected.square().sum()], rtol=1e-12)


def test_weights_that_the_library_can_read_no_more_are_left_to_others():
    weight = nn.Parameter(random(4, 5))
    weights = native.Standing([weight])
    assert native.described(weights) is not None
    weight.data = weight.data[:, ::2]
    assert native.described(weights) is None


# ---- the sampled update ----


def drawn(tensors, size):
    each = [sample_indices(f"t{at}", tensor.numel(), size) for at, tensor in enumerate(tensors)]
    return np.concatenate(each), np.cumsum([0, *map(len, each)])


@over_paths("path")
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 700),
)
def test_the_sampled_update_is_that_of_torch_operations_and_of_numpy(path, kinds, size):
    tensors = [random(length, dtype=dtype, seed=length) for length, dtype in kinds]
    after = [tensor + (0.01 * random(tensor.numel(), seed=at)).to(tensor.dtype) for at, tensor in enumerate(tensors)]
    places, offsets = drawn(tensors, size)
    found = native.gather_diff(after, places, offsets, native.gather(tensors, places, offsets), path=path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        sampler = UpdateSampler([f"t{at}" for at in range(len(tensors))], size)
        sampler.remember(tensors)
        order, sums = sampler.moved(after)
    by_torch = np.empty((len(tensors), 2))
    by_torch[order] = np.concatenate(sums)
    np.testing.assert_allclose(found, by_torch, rtol=1e-13)

    for at, (old, new) in enumerate(zip(tensors, after, strict=True)):
        sampled = places[offsets[at] : offsets[at + 1]]
        before, now = old.double().numpy()[sampled], new.double().numpy()[sampled]
        np.testing.assert_allclose(found[at], [((now - before) ** 2).sum(), (before**2).sum()], rtol=1e-12)


def test_a_sample_of_a_transposed_tensor_follows_its_memory():
    weight = random(40, 30).t()
    places = np.array([0, 1, 31, 1199], np.int32)
    sample = native.gather([weight], places, np.array([0, 4]))
    np.testing.assert_array_equal(sample.view(np.float32), weight.t().reshape(-1)[places].numpy())


def test_a_sample_takes_eight_bytes_a_float_with_its_place_and_is_reused():
    tensors = [random(100_000), random(50_000)]
    places, offsets = drawn(tensors, 1024)
    first = native.gather(tensors, places, offsets)
    assert first.nbytes + places.nbytes == 2 * 1024 * 8
    assert native.gather(tensors, places, offsets, out=first) is first


@pytest.mark.parametrize("place", [-1, 10, 2**31 - 1])
def test_a_place_outside_of_its_tensor_is_an_error(place):
    places, offsets = np.array([3, place], np.int32), np.array([0, 2])
    with pytest.raises(IndexError, match="outside"):
        native.gather([random(10)], places, offsets)
    with pytest.raises(IndexError, match="outside"):
        native.gather_diff([random(10)], places, offsets, np.zeros(8, np.uint8))


@pytest.mark.parametrize(
    ("places", "offsets", "error"),
    [
        (np.array([0, 1]), np.array([0, 2]), TypeError),
        (np.array([0, 1], np.int32), np.array([0, 2], np.int32), TypeError),
        (np.arange(4, dtype=np.int32)[::2], np.array([0, 2]), TypeError),
        (np.array([0, 1], np.int32), np.array([0, 3]), ValueError),
        (np.array([0, 1], np.int32), np.array([0, 1, 2]), ValueError),
        (np.array([0, 1], np.int32), np.array([0]), ValueError),
    ],
)
def test_places_that_do_not_fit_are_an_error_and_never_read(places, offsets, error):
    with pytest.raises(error):
        native.gather([random(10)], places, offsets)


def test_a_sample_of_another_size_is_an_error():
    places, offsets = drawn([random(10)], 4)
    with pytest.raises(ValueError, match="16 bytes, this one 32"):
        native.gather_diff([random(10).double()], places, offsets, native.gather([random(10)], places, offsets))


# ---- building and loading ----


@pytest.fixture
def _unloaded():
    """Other tests do not see what is loaded here."""
    library._loaded.cache_clear()
    yield
    library._loaded.cache_clear()


@pytest.mark.usefixtures("_unloaded")
def test_a_library_that_is_missing_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert not native.available()
    assert "C compiler" in native.why_not()
    with pytest.raises(RuntimeError, match="C compiler"):
        native.measure([random(3)])


@pytest.mark.usefixtures("_unloaded")
def test_a_library_that_cannot_be_loaded_is_explained(monkeypatch, tmp_path):
    (tmp_path / "_library.abi3.so").write_bytes(b"for another machine")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert not native.available()
    assert "cannot be loaded" in native.why_not()


@pytest.mark.usefixtures("_unloaded")
def test_a_library_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(library, "INTERFACE_VERSION", 0)
    assert not native.available()
    assert "another version" in native.why_not()


def test_the_functions_of_the_host_process_are_not_taken_for_those_of_the_library():
    """Only what Python calls is visible from outside."""
    loaded = ctypes.CDLL(library.library()._name)
    assert not hasattr(loaded, "widen")
    assert hasattr(loaded, "forewarn_measure")


@pytest.fixture
def sources(tmp_path):
    """A copy of what a build needs."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    native_sources = tmp_path / "src" / "forewarn" / "measure" / "engine" / "native"
    shutil.copytree(
        ROOT / "src" / "forewarn" / "measure" / "engine" / "native",
        native_sources,
        ignore=shutil.ignore_patterns("*.so", "__pyc*"),
    )
    return tmp_path


@pytest.mark.parametrize("compiler", ["cc", "false"])
def test_a_build_gives_the_library_or_goes_on_without(sources, monkeypatch, compiler):
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CC", compiler)
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=sources, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    found = [path.name for path in (sources / "src" / "forewarn" / "measure" / "engine" / "native").glob("*.so")]
    assert found == (["_library.abi3.so"] if compiler == "cc" else [])

"""The Triton kernels against numpy and the portable backend.

They run in Triton's interpreter with TRITON_INTERPRET=1 (`make test-triton`), and on the GPU where there is one.
"""

import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forewarn.measure.engine import cuda, portable
from forewarn.measure.engine.statistics import ALL_BLOCKS, COLUMNS

pytest.importorskip("triton.language", reason="`make test-triton` installs Triton")
if not cuda.available():
    pytest.skip(f"{cuda.why_not()}; `make test-triton` uses Triton's interpreter", allow_module_level=True)

from forewarn.measure.engine import cuda_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, 31, 127, 1023, 1024, 1025, 4095, 4096, 4097, 10_007]
SYNCS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "masked_select"}


def normal(size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * scale).to(dtype).to(DEVICE)


def made_of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype).to(DEVICE)


def in_double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy().ravel()


def expected_row(values: np.ndarray) -> list[float]:
    """A row by numpy; sums are correctly rounded."""
    finite = values[np.isfinite(values)]
    return [
        len(values),
        math.fsum(finite),
        math.fsum(finite**2),
        finite.min(initial=np.inf),
        finite.max(initial=-np.inf),
        (values == 0).sum(),
        len(values) - len(finite),
    ]


def expected_histogram(values: np.ndarray) -> np.ndarray:
    """Counts of negative and of positive values by numpy."""
    counts = np.zeros((2, 64), np.int64)
    for value in values[np.isfinite(values) & (values != 0)]:
        exponent = math.frexp(abs(value))[1] - 1
        counts[int(value > 0), min(max(exponent + 40, 0), 63)] += 1
    return counts


def check(*tensors: torch.Tensor) -> None:
    rows, histograms = cuda.measure(tensors, histogram_blocks=ALL_BLOCKS)
    assert rows.dtype is torch.float64
    assert rows.device.type == DEVICE.type
    for row, histogram, tensor in zip(rows.cpu().numpy(), histograms.cpu().numpy(), tensors, strict=True):
        values = in_double(tensor)
        expected = expected_row(values)
        exactly = [COLUMNS.index(name) for name in ("count", "min", "max", "zeros", "nonfinite")]
        np.testing.assert_array_equal(row[exactly], np.array(expected)[exactly])
        magnitudes = np.abs(values[np.isfinite(values)]).sum()
        np.testing.assert_allclose(row[1], expected[1], rtol=0, atol=1e-14 * magnitudes)
        np.testing.assert_allclose(row[2], expected[2], rtol=1e-14)
        np.testing.assert_array_equal(histogram, expected_histogram(values))


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(st.sampled_from(SIZES), st.integers(0, 3000)),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e3]),
    st.sets(st.sampled_from(["nan", "inf", "-inf", "zeros"])),
    st.integers(0, 2**31),
)
def test_every_column_and_every_bin_equals_numpy_in_double_precision(size, dtype, scale, specials, seed):
    tensor = normal(size, dtype, scale, seed)
    for at, special in enumerate(sorted(specials)):
        tensor[at :: 7 + at] = 0.0 if special == "zeros" else float(special)
    check(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_third_and_fourth_powers_are_two_more_columns_beside_the_same_others(dtype):
    tensors = [normal(size, dtype, seed=size) for size in (0, 5, 1025, 3 * 16384 + 5)]
    tensors[2][7] = float("nan")
    rows, _ = cuda.measure(tensors, powers=True)
    np.testing.assert_array_equal(rows[:, : len(COLUMNS)].cpu(), cuda.measure(tensors)[0].cpu())
    for row, tensor in zip(rows.cpu().numpy(), tensors, strict=True):
        values = in_double(tensor)
        finite = values[np.isfinite(values)]
        for column, power in ((7, 3), (8, 4)):
            size = (np.abs(finite) ** power).sum()
            np.testing.assert_allclose(row[column], math.fsum(finite**power), rtol=0, atol=1e-13 * size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_any_size_is_read_to_its_end_and_not_beyond(dtype):
    surrounded = normal(sum(SIZES) + len(SIZES), dtype)
    tensors, at = [], 1
    for size in SIZES:
        tensors.append(surrounded[at : at + size])
        at += size + 1
    check(*tensors)


def test_a_tensor_of_several_chunks_is_the_sum_of_them():
    check(normal(3 * 16384 + 5), normal(7), normal(16384), normal(2 * 16384 + 1, torch.bfloat16))


def test_tensors_of_mixed_types_and_sizes_give_the_rows_of_the_portable_backend_in_their_order():
    tensors = [normal(SIZES[at % 12], DTYPES[at % 4 - at % 3], seed=at) for at in range(24)]
    tensors[5][::3] = 0.0
    tensors[11][17] = float("nan")
    rows, histograms = cuda.measure(tensors, histogram_blocks=ALL_BLOCKS)
    portable_rows, portable_histograms = portable.measure(tensors, True)
    torch.testing.assert_close(rows, portable_rows, rtol=1e-12, atol=1e-12)
    assert torch.equal(histograms, portable_histograms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_a_type_are_counted_like_everything_else(dtype):
    limits = torch.finfo(dtype)
    largest = math.sqrt(limits.max) / 4 if dtype is torch.float64 else limits.max  # squares are kept in double
    ends = [limits.tiny, limits.tiny / 2, limits.smallest_normal * limits.eps, largest, 1.0, 0.0]
    check(made_of([*ends, *[-value for value in ends], math.nan, math.inf, -math.inf], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_power_of_two_opens_its_bin(dtype):
    exponents = range(-24, 16) if dtype is torch.float16 else range(-45, 30)
    just_below = 1.0 - torch.finfo(dtype).eps / 2
    tensor = made_of([sign * 2.0**at * f for at in exponents for sign in (1, -1) for f in (1.0, just_below)], dtype)
    check(tensor)


def test_squares_near_the_end_of_float32_do_not_overflow():
    rows, _ = cuda.measure([torch.full((100,), 1e20, device=DEVICE)])
    assert rows[0, 2].item() == pytest.approx(1e42, rel=1e-6)


def test_the_spread_of_a_nearly_constant_tensor_is_not_lost():
    tensor = 1.0 + 1e-4 * normal(10_000)
    count, total, squares = cuda.measure([tensor])[0][0, :3].tolist()
    assert math.sqrt(squares / count - (total / count) ** 2) == pytest.approx(in_double(tensor).std(), rel=1e-6)


def test_a_tensor_without_a_finite_value_has_no_extrema():
    rows, _ = cuda.measure([torch.full((3,), math.nan, device=DEVICE), torch.empty(0, 4, device=DEVICE)])
    assert rows.tolist() == [[3, 0, 0, math.inf, -math.inf, 0, 3], [0, 0, 0, math.inf, -math.inf, 0, 0]]


def test_a_sampled_histogram_takes_so_many_blocks_and_rows_take_all():
    tensor = normal(9 * 4096 + 100)
    rows, histograms = cuda.measure([tensor, normal(10)], histogram_blocks=4)
    values = in_double(tensor)
    taken = np.concatenate([values[start : start + 4096] for start in range(0, len(values), 3 * 4096)])
    np.testing.assert_array_equal(histograms[0].cpu(), expected_histogram(taken))
    assert histograms[1].sum().item() == 10
    assert rows[0, 0].item() == len(values)
    assert rows[0, 1].item() == pytest.approx(values.sum(), rel=1e-12)


def test_of_a_large_tensor_one_block_in_16_is_counted_however_few_are_asked_for():
    tensor = normal(33 * 4096 + 100)
    _, histograms = cuda.measure([tensor], histogram_blocks=1)
    values = in_double(tensor)
    taken = np.concatenate([values[start : start + 4096] for start in range(0, len(values), 16 * 4096)])
    np.testing.assert_array_equal(histograms[0].cpu(), expected_histogram(taken))


def test_without_a_histogram_there_is_none():
    assert cuda.measure([normal(10)])[1] is None


def test_a_row_is_the_same_to_the_last_bit_whatever_else_is_measured():
    tensor = normal(40_000)
    alone = cuda.measure([tensor])[0][0]
    for others in ([normal(5)], [normal(20_000, torch.float16), normal(16385)]):
        assert torch.equal(cuda.measure([*others, tensor, *others])[0][len(others)], alone)


class Launching:
    """A kernel that counts how often it is launched."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def launching(monkeypatch) -> tuple[Launching, Launching]:
    """Both kernels, counted."""
    read, add = Launching(cuda_kernels.read_chunks), Launching(cuda_kernels.add_chunks)
    monkeypatch.setattr(cuda_kernels, "read_chunks", read)
    monkeypatch.setattr(cuda_kernels, "add_chunks", add)
    return read, add


@pytest.mark.parametrize("num_tensors", [4, 40])
@pytest.mark.parametrize("dtypes", [[torch.float32], DTYPES], ids=["one dtype", "all dtypes"])
def test_one_launch_for_each_dtype_however_many_tensors(launching, num_tensors, dtypes):
    read, add = launching
    cuda.measure([normal(3 + at, dtypes[at % len(dtypes)]) for at in range(num_tensors)], histogram_blocks=ALL_BLOCKS)
    assert (read.launches, add.launches) == (len(dtypes), 1)


def test_a_type_with_empty_tensors_only_is_not_launched(launching):
    rows, histograms = cuda.measure([torch.empty(0, device=DEVICE)], histogram_blocks=ALL_BLOCKS)
    assert launching[0].launches == 0
    assert rows[0, 0].item() == 0
    assert histograms.sum().item() == 0


class Counting(TorchDispatchMode):
    """Counts every operation by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_no_host_sync_and_no_operation_more_for_more_tensors():
    counted = []
    for num_tensors in (2, 50):
        tensors = [normal(3 + at) for at in range(num_tensors)]
        with Counting() as counting:
            cuda.measure(tensors, histogram_blocks=ALL_BLOCKS)
        counted.append(counting.operations)
    assert not SYNCS & set(counted[0])
    assert counted[0] == counted[1]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only a real device can be waited for")
def test_a_real_device_is_not_waited_for():
    tensors = [normal(size, dtype) for dtype in DTYPES for size in SIZES]
    cuda.measure(tensors, histogram_blocks=ALL_BLOCKS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda.measure(tensors, histogram_blocks=ALL_BLOCKS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_chunks_are_planned_once_for_the_same_shapes_and_memory_is_found_anew():
    cuda._plan.cache_clear()
    for value in (1.0, 2.0):
        tensors = [torch.full((size,), value, device=DEVICE) for size in (3, 5000)]
        rows, _ = cuda.measure(tensors)
        assert rows[:, 1].tolist() == [3 * value, 5000 * value]
    assert cuda._plan.cache_info()[:2] == (1, 1)
    cuda.measure([normal(3), normal(5001)])
    assert cuda._plan.cache_info().misses == 2


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_memory_that_is_dense_in_another_order_is_read_as_it_lies(layout):
    tensor = normal(4 * 3 * 6 * 5).view(4, 3, 6, 5)
    changed = tensor.to(memory_format=torch.channels_last) if layout == "channels_last" else tensor.transpose(0, 3)
    assert cuda.supports(changed)
    check(changed)


def test_a_parameter_and_its_gradient_are_measured_without_entering_the_graph():
    parameter = torch.nn.Parameter(normal(10))
    (parameter * 3).sum().backward()
    rows, _ = cuda.measure([parameter, parameter.grad])
    assert not rows.requires_grad
    assert rows[1, 1].item() == 30


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    def __tensor_flatten__(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(4, dtype=torch.int64, device=DEVICE), id="integers"),
        pytest.param(torch.ones(4, dtype=torch.complex64, device=DEVICE), id="complex"),
        pytest.param(torch.ones(4, dtype=torch.complex64, device=DEVICE).conj().imag, id="negated view"),
        pytest.param(torch.ones(4, 4, device=DEVICE)[:, ::2], id="strided"),
        pytest.param(torch.ones(1, device=DEVICE).expand(100), id="expanded"),
        pytest.param(torch.eye(3, device=DEVICE).to_sparse(), id="sparse"),
        pytest.param(torch.ones(4, device=DEVICE).as_subclass(Wrapped), id="wrapper"),
        pytest.param(torch.ones(4, device="meta"), id="other device"),
    ],
)
def test_memory_that_does_not_hold_the_values_side_by_side_is_refused(tensor):
    assert not cuda.supports(tensor)
    with pytest.raises(ValueError, match="use the portable backend for the others"):
        cuda.measure([normal(3), tensor])


def test_without_triton_the_backend_says_so_and_reads_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    cuda._without_triton.cache_clear()
    try:
        assert not cuda.available()
        assert "pip install triton" in cuda.why_not()
        assert not cuda.supports(normal(3))
    finally:
        monkeypatch.undo()
        cuda._without_triton.cache_clear()
    assert cuda.available()


COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from forewarn.measure.engine import cuda, cuda_kernels

def compiled(kernel, pointers, constants):
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=dict(cuda._LAUNCH))
    assert made.asm["cubin"]
    return made.asm["ptx"]

sizes = dict(CHUNK=cuda._CHUNK, TILE=cuda._TILE, BLOCK=cuda.BLOCK, NUM_BINS=64, LOWEST_EXPONENT=-40)
for element in ("fp32", "fp64", "fp16", "bf16"):
    sizes["WIDE"] = tl.float64 if element == "fp64" else tl.float32
    for histogram in (dict(HISTOGRAM=True), dict(HISTOGRAM=False, histograms=None)):
        pointers = dict(table="*i64", partials="*fp64", histograms="*i64", like="*" + element)
        print(compiled(cuda_kernels.read_chunks, pointers, {**sizes, **histogram}))
sizes["TILE"] = cuda._COMBINED
print(compiled(cuda_kernels.add_chunks, dict(table="*i64", partials="*fp64", rows="*fp64"), sizes))
"""


@pytest.mark.parametrize("capability", ["75", "80", "90"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path, capability):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", COMPILE, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    instructions = Counter(part for line in done.stdout.splitlines() for part in line.split()[:3] if "." in part)
    flushing = [name for name in instructions if ".ftz" in name]
    assert not flushing, "denormals would count as zeros"
    unordered = [name for name in instructions if name.startswith(("atom.", "red.")) and name.endswith(("f32", "f64"))]
    assert not unordered, "sums would depend on the order of the programs"
    assert instructions["fma.rn.f64"] > 0

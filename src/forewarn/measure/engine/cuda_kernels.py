"""The two Triton kernels behind `forewarn.measure.engine.cuda`: one reads chunks of tensors, one adds the chunks up.

Both read one int64 table: the address, the length and the first chunk of every tensor, then the owner of every chunk.
Each chunk writes to its own place, and places are added in order. So results repeat bit by bit, in whatever order a GPU
runs the chunks. Histograms are added by atomics, which is exact for integers in any order.
"""

# Kernels are written in Triton's language: it has its own types, and capitals for compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

import triton
from triton import language as tl

# These counts change between calls and are not compiled in, so the kernel is compiled only once per dtype.
_VARYING = ["num_tensors", "num_chunks", "first_chunk", "most_blocks"]


@triton.jit
def _widened(x, WIDE: tl.constexpr):
    """The same values in a type with readable exponent bits; denormals are preserved."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(WIDE)
    return wide


@triton.jit
def _binary_exponent(x):
    """The power of two of a magnitude, from its bits; a denormal gets the one below all normal numbers."""
    if x.dtype == tl.float64:
        exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    else:
        exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    return exponent


@triton.jit(do_not_specialize=_VARYING)
def read_chunks(
    table,
    partials,
    histograms,
    num_tensors,
    num_chunks,
    first_chunk,
    most_blocks,
    like,
    WIDE: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    POWERS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BINS: tl.constexpr,
    LOWEST_EXPONENT: tl.constexpr,
):
    """Statistics of one chunk of one tensor into its column of `partials` [6 × chunks]; `like` only gives a type.

    With POWERS there are two further rows: the sums of third and of fourth powers.

    Sums are kept in double, lane by lane. float32 would overflow on squares of 1e20, flush those of 1e-30 and lose the
    spread of near-constant weights. A compensated sum breaks silently where a compiler fuses multiply and add. Double
    sums take three operations per element, which limits the speed where double is slow.
    """
    chunk = first_chunk + tl.program_id(0)
    tensor = tl.load(table + 3 * num_tensors + chunk)
    values = tl.load(table + tensor).to(like.dtype)
    length = tl.load(table + num_tensors + tensor)
    start = (chunk - tl.load(table + 2 * num_tensors + tensor)) * CHUNK
    if HISTOGRAM:
        # The distance between counted blocks: at most 16, as in histogram.c.
        stride = tl.minimum(tl.cdiv(tl.cdiv(length, BLOCK), most_blocks), 16)

    lane = tl.arange(0, TILE)
    bins = tl.arange(0, 2 * NUM_BINS)
    total = tl.zeros((TILE,), tl.float64)
    squares = tl.zeros((TILE,), tl.float64)
    least = tl.full((TILE,), float("inf"), WIDE)
    most = tl.full((TILE,), float("-inf"), WIDE)
    zeros = tl.zeros((TILE,), tl.int32)
    nonfinite = tl.zeros((TILE,), tl.int32)
    counts = tl.zeros((2 * NUM_BINS,), tl.int32)
    cubes = tl.zeros((TILE,), tl.float64)
    fourths = tl.zeros((TILE,), tl.float64)

    for offset in range(start, tl.minimum(start + CHUNK, length), TILE):
        inside = offset + lane < length
        x = _widened(tl.load(values + offset + lane, mask=inside, other=0.0), WIDE)
        finite = tl.abs(x) < float("inf")
        clean = tl.where(finite, x, 0.0).to(tl.float64)
        total += clean
        squares = tl.fma(clean, clean, squares)
        least = tl.minimum(least, tl.where(inside & finite, x, float("inf")))
        most = tl.maximum(most, tl.where(inside & finite, x, float("-inf")))
        zeros += (inside & (x == 0.0)).to(tl.int32)
        nonfinite += tl.where(finite, 0, 1)
        if POWERS:
            square = clean * clean
            cubes += square * clean
            fourths += square * square
        if HISTOGRAM:  # noqa: SIM102 - this one is decided at compile time, the next at run time
            if (offset // BLOCK) % stride == 0:
                counted = finite & (x != 0.0)
                place = tl.minimum(tl.maximum(_binary_exponent(x) - LOWEST_EXPONENT, 0), NUM_BINS - 1)
                place = tl.where(counted, tl.where(x > 0.0, place + NUM_BINS, place), 0)
                # Values beyond the bins are undefined in Triton, so uncounted values go to bin 0 and are subtracted.
                uncounted = TILE - tl.sum(counted.to(tl.int32))
                counts += tl.histogram(place, 2 * NUM_BINS) - tl.where(bins == 0, uncounted, 0)

    into = partials + chunk
    tl.store(into, tl.sum(total))
    tl.store(into + num_chunks, tl.sum(squares))
    tl.store(into + 2 * num_chunks, tl.min(least).to(tl.float64))
    tl.store(into + 3 * num_chunks, tl.max(most).to(tl.float64))
    tl.store(into + 4 * num_chunks, tl.sum(zeros).to(tl.float64))
    tl.store(into + 5 * num_chunks, tl.sum(nonfinite).to(tl.float64))
    if POWERS:
        tl.store(into + 6 * num_chunks, tl.sum(cubes))
        tl.store(into + 7 * num_chunks, tl.sum(fourths))
    if HISTOGRAM:
        tl.atomic_add(histograms + tensor * 2 * NUM_BINS + bins, counts.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=_VARYING)
def add_chunks(
    table, partials, rows, num_tensors, num_chunks, POWERS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """The row of one tensor, in the order of `engine.MOMENTS`, from the partial results of its chunks."""
    tensor = tl.program_id(0).to(tl.int64)
    length = tl.load(table + num_tensors + tensor)
    first = tl.load(table + 2 * num_tensors + tensor)
    end = first + tl.cdiv(length, CHUNK)

    lane = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float64)
    squares = tl.zeros((TILE,), tl.float64)
    least = tl.full((TILE,), float("inf"), tl.float64)
    most = tl.full((TILE,), float("-inf"), tl.float64)
    zeros = tl.zeros((TILE,), tl.float64)
    nonfinite = tl.zeros((TILE,), tl.float64)
    cubes = tl.zeros((TILE,), tl.float64)
    fourths = tl.zeros((TILE,), tl.float64)

    for offset in range(first, end, TILE):
        inside = offset + lane < end
        column = partials + offset + lane
        total += tl.load(column, mask=inside, other=0.0)
        squares += tl.load(column + num_chunks, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(column + 2 * num_chunks, mask=inside, other=float("inf")))
        most = tl.maximum(most, tl.load(column + 3 * num_chunks, mask=inside, other=float("-inf")))
        zeros += tl.load(column + 4 * num_chunks, mask=inside, other=0.0)
        nonfinite += tl.load(column + 5 * num_chunks, mask=inside, other=0.0)
        if POWERS:
            cubes += tl.load(column + 6 * num_chunks, mask=inside, other=0.0)
            fourths += tl.load(column + 7 * num_chunks, mask=inside, other=0.0)

    row = rows + (9 if POWERS else 7) * tensor
    tl.store(row, length.to(tl.float64))
    tl.store(row + 1, tl.sum(total))
    tl.store(row + 2, tl.sum(squares))
    tl.store(row + 3, tl.min(least))
    tl.store(row + 4, tl.max(most))
    tl.store(row + 5, tl.sum(zeros))
    tl.store(row + 6, tl.sum(nonfinite))
    if POWERS:
        tl.store(row + 7, tl.sum(cubes))
        tl.store(row + 8, tl.sum(fourths))

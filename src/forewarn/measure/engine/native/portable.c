/* The code path in plain C: values are widened to double, and the compiler vectorizes the loops over lanes. */

#include "kernels.h"

#include <math.h>
#include <string.h>

enum { PIECE = 256 /* values that are widened at once: 2 KiB, an even number and a multiple of LANES */ };

/* ---- widening ---- */

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* With its fields shifted into those of a float, a half is 2^-112 of its value, even if it is denormal. */
static inline float float_of_half(uint16_t half)
{
    uint32_t magnitude = half & 0x7FFFu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t bits = bits_of(float_of(magnitude << 13) * 0x1p112f);
    uint32_t nonfinite = magnitude >= 0x7C00u ? 0x7F800000u : 0;
    return float_of(bits | nonfinite | sign);
}

void widen(Dtype dtype, const void *values, size_t length, double *restrict wide)
{
    const unsigned char *bytes = values;
    if (dtype == FLOAT64) {
        memcpy(wide, bytes, length * sizeof(double));
    } else if (dtype == FLOAT32) {
        for (size_t i = 0; i < length; i++) {
            float value;
            memcpy(&value, bytes + 4 * i, sizeof value);
            wide[i] = value;
        }
    } else {
        for (size_t i = 0; i < length; i++) {
            uint16_t half;
            memcpy(&half, bytes + 2 * i, sizeof half);
            wide[i] = dtype == FLOAT16 ? float_of_half(half) : float_of((uint32_t)half << 16);
        }
    }
}

/* ---- rows ---- */

/* Zeros are counted in doubles: not every vector unit compares integers of their width. */
typedef struct {
    double sum[LANES], sum_squares[LANES], min[LANES], max[LANES], zeros[LANES];
} Lanes;

static inline void add_to_lanes(const double *restrict values, size_t length, Lanes *restrict lanes)
{
    for (size_t i = 0; i < length; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            double value = values[i + k];
            lanes->sum[k] += value;
            lanes->sum_squares[k] += value * value;
            lanes->min[k] = value < lanes->min[k] ? value : lanes->min[k];
            lanes->max[k] = value > lanes->max[k] ? value : lanes->max[k];
            lanes->zeros[k] += value == 0 ? 1.0 : 0.0;
        }
    }
}

static void fold_lanes(Lanes *lanes, Row *row)
{
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half; k++) {
            lanes->sum[k] += lanes->sum[k + half];
            lanes->sum_squares[k] += lanes->sum_squares[k + half];
            lanes->min[k] = fmin(lanes->min[k], lanes->min[k + half]);
            lanes->max[k] = fmax(lanes->max[k], lanes->max[k + half]);
            lanes->zeros[k] += lanes->zeros[k + half];
        }
    }
    *row = (Row){lanes->sum[0], lanes->sum_squares[0], lanes->min[0], lanes->max[0], (int64_t)lanes->zeros[0], 0};
}

static void row_of(Dtype dtype, const void *values, size_t length, Row *row)
{
    const unsigned char *bytes = values;
    size_t size = element_size(dtype), whole = length - length % LANES;
    double wide[PIECE];
    Lanes lanes = {0};
    for (size_t k = 0; k < LANES; k++) {
        lanes.min[k] = INFINITY;
        lanes.max[k] = -INFINITY;
    }
    for (size_t i = 0; i < whole; i += PIECE) {
        size_t piece = whole - i < PIECE ? whole - i : PIECE;
        widen(dtype, bytes + i * size, piece, wide);
        add_to_lanes(wide, piece, &lanes);
    }
    fold_lanes(&lanes, row);
    add_tail(dtype, bytes + whole * size, length - whole, row);
}

static inline void add_value(double value, Row *row)
{
    row->sum += value;
    row->sum_squares += value * value;
    row->min = value < row->min ? value : row->min;
    row->max = value > row->max ? value : row->max;
    row->zeros += value == 0;
}

void add_tail(Dtype dtype, const void *values, size_t length, Row *row)
{
    double wide[LANES];
    widen(dtype, values, length, wide);
    for (size_t i = 0; i < length; i++) {
        add_value(wide[i], row);
    }
}

void careful_row(Dtype dtype, const void *values, size_t length, Row *row)
{
    const unsigned char *bytes = values;
    double wide[PIECE];
    *row = (Row){.min = INFINITY, .max = -INFINITY};
    for (size_t i = 0; i < length; i += PIECE) {
        size_t piece = length - i < PIECE ? length - i : PIECE;
        widen(dtype, bytes + i * element_size(dtype), piece, wide);
        for (size_t k = 0; k < piece; k++) {
            if (isfinite(wide[k])) {
                add_value(wide[k], row);
            } else {
                row->nonfinite++;
            }
        }
    }
}

/* ---- powers ---- */

typedef struct {
    double cubes[LANES], fourths[LANES];
} PowerLanes;

static inline void add_power(double value, Powers *powers)
{
    double square = value * value;
    powers->cubes += square * value;
    powers->fourths += square * square;
}

static void powers_of(Dtype dtype, const void *values, size_t length, Powers *powers)
{
    const unsigned char *bytes = values;
    size_t size = element_size(dtype), whole = length - length % LANES;
    double wide[PIECE];
    PowerLanes lanes = {0};
    for (size_t i = 0; i < whole; i += PIECE) {
        size_t piece = whole - i < PIECE ? whole - i : PIECE;
        widen(dtype, bytes + i * size, piece, wide);
        for (size_t j = 0; j < piece; j += LANES) {
            for (size_t k = 0; k < LANES; k++) {
                double value = wide[j + k], square = value * value;
                lanes.cubes[k] += square * value;
                lanes.fourths[k] += square * square;
            }
        }
    }
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half; k++) {
            lanes.cubes[k] += lanes.cubes[k + half];
            lanes.fourths[k] += lanes.fourths[k + half];
        }
    }
    *powers = (Powers){lanes.cubes[0], lanes.fourths[0]};
    add_powers(dtype, bytes + whole * size, length - whole, powers);
}

void add_powers(Dtype dtype, const void *values, size_t length, Powers *powers)
{
    double wide[LANES];
    widen(dtype, values, length, wide);
    for (size_t i = 0; i < length; i++) {
        add_power(wide[i], powers);
    }
}

void careful_powers(Dtype dtype, const void *values, size_t length, Powers *powers)
{
    const unsigned char *bytes = values;
    double wide[PIECE];
    *powers = (Powers){0};
    for (size_t i = 0; i < length; i += PIECE) {
        size_t piece = length - i < PIECE ? length - i : PIECE;
        widen(dtype, bytes + i * element_size(dtype), piece, wide);
        for (size_t k = 0; k < piece; k++) {
            if (isfinite(wide[k])) {
                add_power(wide[k], powers);
            }
        }
    }
}

/* ---- codes ---- */

static inline unsigned code_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int bin = (int)(bits >> DOUBLE_MANTISSA & 0x7FF) - (DOUBLE_BIAS + LOWEST_EXPONENT);
    bin = bin < 0 ? 0 : bin > NUM_BINS - 1 ? NUM_BINS - 1 : bin;
    return (unsigned)bin + (unsigned)(bits >> 63) * NEGATIVE;
}

static void pairs_of(Dtype dtype, const void *values, size_t length, Pair *restrict pairs)
{
    const unsigned char *bytes = values;
    double wide[PIECE];
    for (size_t i = 0; i < length; i += PIECE) {
        size_t piece = length - i < PIECE ? length - i : PIECE;
        widen(dtype, bytes + i * element_size(dtype), piece, wide);
        for (size_t k = 0; k + 1 < piece; k += 2) {
            pairs[(i + k) / 2] = (Pair)(code_of(wide[k]) | code_of(wide[k + 1]) << CODE_BITS);
        }
        if (piece % 2) {
            pairs[(i + piece) / 2] = (Pair)code_of(wide[piece - 1]);
        }
    }
}

void careful_pairs(Dtype dtype, const void *values, size_t length, Pair *pairs)
{
    const unsigned char *bytes = values;
    double wide[PIECE];
    size_t num_codes = 0;
    for (size_t i = 0; i < length; i += PIECE) {
        size_t piece = length - i < PIECE ? length - i : PIECE;
        widen(dtype, bytes + i * element_size(dtype), piece, wide);
        for (size_t k = 0; k < piece; k++) {
            if (isfinite(wide[k])) {
                Pair *pair = &pairs[num_codes++ / 2];
                *pair = (Pair)(num_codes % 2 ? code_of(wide[k]) : *pair | code_of(wide[k]) << CODE_BITS);
            }
        }
    }
}

/* The count has the width of a value, which suits vectors: it is at most BLOCK. */
#define COUNT_EQUAL(type, wanted)                                                                                     \
    do {                                                                                                              \
        type count = 0, bits;                                                                                         \
        for (size_t i = 0; i < length; i++) {                                                                         \
            memcpy(&bits, bytes + i * sizeof bits, sizeof bits);                                                      \
            count = (type)(count + (bits == (wanted)));                                                               \
        }                                                                                                             \
        return (int64_t)count;                                                                                        \
    } while (0)

int64_t negative_zeros(Dtype dtype, const void *values, size_t length)
{
    const unsigned char *bytes = values;
    switch (element_size(dtype)) {
    case 2: COUNT_EQUAL(uint16_t, UINT16_C(0x8000));
    case 4: COUNT_EQUAL(uint32_t, UINT32_C(0x80000000));
    default: COUNT_EQUAL(uint64_t, UINT64_C(0x8000000000000000));
    }
}

/* ---- steps ---- */

static void moved_of(Dtype dtype, const void *values, const void *before, size_t length, Moved *restrict moved)
{
    const unsigned char *now = values, *then = before;
    size_t size = element_size(dtype);
    double new[PIECE], old[PIECE];
    for (size_t i = 0; i < length; i += PIECE) {
        size_t piece = length - i < PIECE ? length - i : PIECE;
        widen(dtype, now + i * size, piece, new);
        widen(dtype, then + i * size, piece, old);
        for (size_t j = 0; j < piece; j += LANES) {
            for (size_t k = 0; k < LANES; k++) {
                double step = new[j + k] - old[j + k];
                moved->steps[k] += step * step;
                moved->before[k] += old[j + k] * old[j + k];
            }
        }
    }
}

KERNELS(, float32, FLOAT32)
KERNELS(, float64, FLOAT64)
KERNELS(, float16, FLOAT16)
KERNELS(, bfloat16, BFLOAT16)

const Path portable_path = PATH("portable");

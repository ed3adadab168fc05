/* The code path for x86-64 with AVX2, FMA and F16C: eight floats or four doubles at a time. */

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline)) AVX2

/* ---- loading eight values as floats, or four as doubles ---- */

INLINE __m256 load_floats(Dtype dtype, const void *values, size_t at)
{
    if (dtype == FLOAT32) {
        return _mm256_loadu_ps((const float *)values + at);
    }
    __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)values + at));
    if (dtype == FLOAT16) {
        return _mm256_cvtph_ps(halves);
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* From memory again, where that is a load and no work: cheaper than to take the eight floats apart. */
INLINE __m256d load_doubles(Dtype dtype, const void *values, size_t at)
{
    if (dtype == FLOAT64) {
        return _mm256_loadu_pd((const double *)values + at);
    }
    if (dtype == FLOAT32) {
        return _mm256_cvtps_pd(_mm_loadu_ps((const float *)values + at));
    }
    __m128i halves = _mm_loadl_epi64((const __m128i *)((const uint16_t *)values + at));
    if (dtype == FLOAT16) {
        return _mm256_cvtps_pd(_mm_cvtph_ps(halves));
    }
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16)));
}

/* ---- rows: lane k of the portable path is element k of these vectors side by side ---- */

typedef struct {
    __m256d lane[4];
} Sums;

INLINE double folded(Sums sums)
{
    __m256d half = _mm256_add_pd(_mm256_add_pd(sums.lane[0], sums.lane[2]), _mm256_add_pd(sums.lane[1], sums.lane[3]));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

INLINE float least(__m256 values)
{
    __m128 four = _mm_min_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}

INLINE double least_double(__m256d values)
{
    __m128d two = _mm_min_pd(_mm256_castpd256_pd128(values), _mm256_extractf128_pd(values, 1));
    return _mm_cvtsd_f64(_mm_min_sd(two, _mm_unpackhi_pd(two, two)));
}

INLINE int64_t total(__m256i counts)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(counts), _mm256_extracti128_si256(counts, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

INLINE void row_of_floats(Dtype dtype, const void *values, size_t length, Row *row)
{
    const __m256 nothing = _mm256_setzero_ps();
    Sums sum = {{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}}, squares = sum;
    __m256 min = _mm256_set1_ps(INFINITY), max = _mm256_set1_ps(-INFINITY);
    __m256i zeros = _mm256_setzero_si256();
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t k = 0; k < 4; k++) {
            __m256d wide = load_doubles(dtype, values, i + 4 * k);
            sum.lane[k] = _mm256_add_pd(sum.lane[k], wide);
            /* The square of a float is exact in a double: fused or not, the result is the same. */
            squares.lane[k] = _mm256_fmadd_pd(wide, wide, squares.lane[k]);
        }
        for (size_t k = 0; k < 2; k++) {
            __m256 value = load_floats(dtype, values, i + 8 * k);
            min = _mm256_min_ps(value, min);
            max = _mm256_max_ps(value, max);
            zeros = _mm256_sub_epi32(zeros, _mm256_castps_si256(_mm256_cmp_ps(value, nothing, _CMP_EQ_OQ)));
        }
    }
    const __m256 sign = _mm256_set1_ps(-0.0f);
    row->sum = folded(sum);
    row->sum_squares = folded(squares);
    row->min = least(min);
    row->max = -least(_mm256_xor_ps(max, sign));
    row->zeros = total(zeros);
    row->nonfinite = 0;
    add_tail(dtype, (const char *)values + whole * element_size(dtype), length - whole, row);
}

INLINE void row_of_doubles(const double *values, size_t length, Row *row)
{
    const __m256d nothing = _mm256_setzero_pd();
    Sums sum = {{nothing, nothing, nothing, nothing}}, squares = sum;
    __m256d min = _mm256_set1_pd(INFINITY), max = _mm256_set1_pd(-INFINITY);
    __m256i zeros = _mm256_setzero_si256(); /* in pairs of 32 bits, both of which count: twice what there is */
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (int k = 0; k < 4; k++) {
            __m256d value = _mm256_loadu_pd(values + i + 4 * k);
            sum.lane[k] = _mm256_add_pd(sum.lane[k], value);
            squares.lane[k] = _mm256_add_pd(squares.lane[k], _mm256_mul_pd(value, value));
            min = _mm256_min_pd(value, min);
            max = _mm256_max_pd(value, max);
            zeros = _mm256_sub_epi32(zeros, _mm256_castpd_si256(_mm256_cmp_pd(value, nothing, _CMP_EQ_OQ)));
        }
    }
    const __m256d sign = _mm256_set1_pd(-0.0);
    row->sum = folded(sum);
    row->sum_squares = folded(squares);
    row->min = least_double(min);
    row->max = -least_double(_mm256_xor_pd(max, sign));
    row->zeros = total(zeros) / 2;
    row->nonfinite = 0;
    add_tail(FLOAT64, values + whole, length - whole, row);
}

/* ---- powers: multiplied and added apart, as the portable path does ---- */

INLINE void add_four_powers(__m256d value, size_t k, Sums *cubes, Sums *fourths)
{
    __m256d square = _mm256_mul_pd(value, value);
    cubes->lane[k] = _mm256_add_pd(cubes->lane[k], _mm256_mul_pd(square, value));
    fourths->lane[k] = _mm256_add_pd(fourths->lane[k], _mm256_mul_pd(square, square));
}

INLINE void powers_of_any(Dtype dtype, const void *values, size_t length, Powers *powers)
{
    Sums cubes = {{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}};
    Sums fourths = cubes;
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t k = 0; k < 4; k++) {
            __m256d value = dtype == FLOAT64 ? _mm256_loadu_pd((const double *)values + i + 4 * k)
                                             : load_doubles(dtype, values, i + 4 * k);
            add_four_powers(value, k, &cubes, &fourths);
        }
    }
    *powers = (Powers){folded(cubes), folded(fourths)};
    add_powers(dtype, (const char *)values + whole * element_size(dtype), length - whole, powers);
}

/* ---- codes ---- */

/* The codes of 16 values from their sign and exponent, as sign-extended integers of 16 bits. */
INLINE __m256i codes_of(__m256i tops, int exponent_mask, int bias)
{
    __m256i exponent = _mm256_and_si256(tops, _mm256_set1_epi16((short)exponent_mask));
    __m256i above = _mm256_subs_epu16(exponent, _mm256_set1_epi16((short)(bias + LOWEST_EXPONENT)));
    __m256i bin = _mm256_min_epi16(above, _mm256_set1_epi16(NUM_BINS - 1));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi16(tops, 15 - (CODE_BITS - 1)), _mm256_set1_epi16(NEGATIVE));
    return _mm256_or_si256(bin, sign);
}

INLINE void store_pairs(__m256i first, __m256i second, Pair *pairs)
{
    _mm256_storeu_si256((__m256i *)pairs, _mm256_or_si256(first, _mm256_slli_epi16(second, CODE_BITS)));
}

/* Sign and exponent of 16 floats; the order does not matter. */
INLINE __m256i tops_of_floats(Dtype dtype, const void *values, size_t at)
{
    __m256i first = _mm256_castps_si256(load_floats(dtype, values, at));
    __m256i second = _mm256_castps_si256(load_floats(dtype, values, at + 8));
    return _mm256_packs_epi32(_mm256_srai_epi32(first, FLOAT_MANTISSA), _mm256_srai_epi32(second, FLOAT_MANTISSA));
}

INLINE void pairs_of_floats(Dtype dtype, const void *values, size_t length, Pair *pairs)
{
    size_t whole = length - length % (2 * LANES);
    for (size_t i = 0; i < whole; i += 2 * LANES) {
        __m256i first = codes_of(tops_of_floats(dtype, values, i), 0xFF, FLOAT_BIAS);
        __m256i second = codes_of(tops_of_floats(dtype, values, i + LANES), 0xFF, FLOAT_BIAS);
        store_pairs(first, second, pairs + i / 2);
    }
    careful_pairs(dtype, (const char *)values + whole * element_size(dtype), length - whole, pairs + whole / 2);
}

/* The upper halves of eight doubles, which hold sign and exponent. */
INLINE __m256i upper_halves(const double *values)
{
    __m256 first = _mm256_castpd_ps(_mm256_loadu_pd(values)), second = _mm256_castpd_ps(_mm256_loadu_pd(values + 4));
    return _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xDD));
}

INLINE __m256i tops_of_doubles(const double *values)
{
    return _mm256_packs_epi32(_mm256_srai_epi32(upper_halves(values), DOUBLE_MANTISSA - 32),
                              _mm256_srai_epi32(upper_halves(values + 8), DOUBLE_MANTISSA - 32));
}

INLINE void pairs_of_doubles(const double *values, size_t length, Pair *pairs)
{
    size_t whole = length - length % (2 * LANES);
    for (size_t i = 0; i < whole; i += 2 * LANES) {
        __m256i first = codes_of(tops_of_doubles(values + i), 0x7FF, DOUBLE_BIAS);
        __m256i second = codes_of(tops_of_doubles(values + i + LANES), 0x7FF, DOUBLE_BIAS);
        store_pairs(first, second, pairs + i / 2);
    }
    careful_pairs(FLOAT64, values + whole, length - whole, pairs + whole / 2);
}

/* ---- steps ---- */

INLINE void moved_of(Dtype dtype, const void *values, const void *before, size_t length, Moved *moved)
{
    for (size_t half = 0; half < LANES; half += LANES / 2) { /* eight sums fit into the registers, sixteen do not */
        __m256d steps[2], squares[2];
        for (size_t k = 0; k < 2; k++) {
            steps[k] = _mm256_loadu_pd(moved->steps + half + 4 * k);
            squares[k] = _mm256_loadu_pd(moved->before + half + 4 * k);
        }
        for (size_t i = half; i < length; i += LANES) {
            for (size_t k = 0; k < 2; k++) {
                __m256d old = load_doubles(dtype, before, i + 4 * k);
                __m256d step = _mm256_sub_pd(load_doubles(dtype, values, i + 4 * k), old);
                steps[k] = _mm256_add_pd(steps[k], _mm256_mul_pd(step, step));
                squares[k] = _mm256_add_pd(squares[k], _mm256_mul_pd(old, old));
            }
        }
        for (size_t k = 0; k < 2; k++) {
            _mm256_storeu_pd(moved->steps + half + 4 * k, steps[k]);
            _mm256_storeu_pd(moved->before + half + 4 * k, squares[k]);
        }
    }
}

/* ---- one function per kind, with the kind known to the compiler ---- */

#define MOVED(kind, dtype)                                                                                            \
    AVX2 static void moved_of_##kind(const void *values, const void *before, size_t length, Moved *moved)             \
    {                                                                                                                 \
        moved_of(dtype, values, before, length, moved);                                                               \
    }

#define KERNELS(kind, dtype)                                                                                          \
    AVX2 static void row_of_##kind(const void *values, size_t length, Row *row)                                       \
    {                                                                                                                 \
        row_of_floats(dtype, values, length, row);                                                                    \
    }                                                                                                                 \
    AVX2 static void pairs_of_##kind(const void *values, size_t length, Pair *pairs)                                  \
    {                                                                                                                 \
        pairs_of_floats(dtype, values, length, pairs);                                                                \
    }                                                                                                                 \
    AVX2 static void powers_of_##kind(const void *values, size_t length, Powers *powers)                              \
    {                                                                                                                 \
        powers_of_any(dtype, values, length, powers);                                                                 \
    }                                                                                                                 \
    MOVED(kind, dtype)

KERNELS(float32, FLOAT32)
KERNELS(float16, FLOAT16)
KERNELS(bfloat16, BFLOAT16)

AVX2 static void row_of_float64(const void *values, size_t length, Row *row) { row_of_doubles(values, length, row); }
AVX2 static void pairs_of_float64(const void *values, size_t length, Pair *pairs)
{
    pairs_of_doubles(values, length, pairs);
}
AVX2 static void powers_of_float64(const void *values, size_t length, Powers *powers)
{
    powers_of_any(FLOAT64, values, length, powers);
}
MOVED(float64, FLOAT64)

static const Path path = {
    .name = "avx2",
    .row = {[FLOAT32] = row_of_float32,
            [FLOAT64] = row_of_float64,
            [FLOAT16] = row_of_float16,
            [BFLOAT16] = row_of_bfloat16},
    .pairs = {[FLOAT32] = pairs_of_float32,
              [FLOAT64] = pairs_of_float64,
              [FLOAT16] = pairs_of_float16,
              [BFLOAT16] = pairs_of_bfloat16},
    .moved = {[FLOAT32] = moved_of_float32,
              [FLOAT64] = moved_of_float64,
              [FLOAT16] = moved_of_float16,
              [BFLOAT16] = moved_of_bfloat16},
    .powers = {[FLOAT32] = powers_of_float32,
               [FLOAT64] = powers_of_float64,
               [FLOAT16] = powers_of_float16,
               [BFLOAT16] = powers_of_bfloat16},
};

/* Not every compiler knows the name of F16C in __builtin_cpu_supports. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

const Path *avx2_path(void)
{
    static atomic_int found; /* 1 yes, -1 no: to ask takes a while, most of all in a virtual machine */
    if (!found) {
        found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() ? 1 : -1;
    }
    return found == 1 ? &path : NULL;
}

#else

const Path *avx2_path(void) { return NULL; }

#endif

/* The code path for x86-64 with AVX2, FMA and F16C: eight floats or four doubles at a time. */

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define WIDE(operation) _mm256_##operation
#define HALF(operation) _mm_##operation

typedef __m256 Floats;
typedef __m128 HalfFloats;
typedef __m256d Doubles;
typedef __m256i Integers;
enum { FLOATS = 8, DOUBLES = 4 };

INLINE __m128i load_halves(const uint16_t *values) { return _mm_loadu_si128((const __m128i *)values); }

INLINE __m128i load_few_halves(const uint16_t *values) { return _mm_loadl_epi64((const __m128i *)values); }

INLINE double folded(const Doubles *lanes)
{
    __m256d four = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
}

INLINE float least(Floats values)
{
    __m128 four = _mm_min_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest(Floats values) { return -least(-values); }

INLINE double least_double(Doubles values)
{
    __m128d two = _mm_min_pd(_mm256_castpd256_pd128(values), _mm256_extractf128_pd(values, 1));
    return _mm_cvtsd_f64(_mm_min_sd(two, _mm_unpackhi_pd(two, two)));
}

INLINE double largest_double(Doubles values) { return -least_double(-values); }

/* 32-bit counts: those of doubles have 64 bits, whose upper half stays 0. */
typedef __m256i Zeros;

INLINE Zeros count_zeros(Floats values, Zeros zeros)
{
    return _mm256_sub_epi32(zeros, (__m256i)_mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_EQ_OQ));
}

INLINE Zeros count_double_zeros(Doubles values, Zeros zeros)
{
    return _mm256_sub_epi64(zeros, (__m256i)_mm256_cmp_pd(values, _mm256_setzero_pd(), _CMP_EQ_OQ));
}

INLINE int64_t total(Zeros zeros)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(zeros), _mm256_extracti128_si256(zeros, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

#include "vectors.h"

static const Path path = PATH("avx2");

/* Not every compiler knows the name of F16C in __builtin_cpu_supports. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

const Path *avx2_path(void)
{
    static atomic_int found; /* 1 yes, -1 no: asking is slow, especially in a virtual machine */
    if (!found) {
        found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() ? 1 : -1;
    }
    return found == 1 ? &path : NULL;
}

#else

const Path *avx2_path(void) { return NULL; }

#endif

/* The code path for x86-64 with AVX-512 (F and BW): sixteen floats or eight doubles at a time.
 *
 * F16C is for halves that become doubles; every processor with AVX-512 also has what the AVX2 path requires. */

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx2,fma,f16c,popcnt")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define WIDE(operation) _mm512_##operation
#define HALF(operation) _mm256_##operation

typedef __m512 Floats;
typedef __m256 HalfFloats;
typedef __m512d Doubles;
typedef __m512i Integers;
enum { FLOATS = 16, DOUBLES = 8 };

INLINE __m256i load_halves(const uint16_t *values) { return _mm256_loadu_si256((const __m256i *)values); }

INLINE __m128i load_few_halves(const uint16_t *values) { return _mm_loadu_si128((const __m128i *)values); }

INLINE double folded(const Doubles *lanes)
{
    __m512d eight = lanes[0] + lanes[1];
    __m256d four = _mm512_castpd512_pd256(eight) + _mm512_extractf64x4_pd(eight, 1);
    __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
}

INLINE float least(Floats values) { return _mm512_reduce_min_ps(values); }
INLINE float largest(Floats values) { return _mm512_reduce_max_ps(values); }
INLINE double least_double(Doubles values) { return _mm512_reduce_min_pd(values); }
INLINE double largest_double(Doubles values) { return _mm512_reduce_max_pd(values); }

typedef int64_t Zeros;

INLINE Zeros count_zeros(Floats values, Zeros zeros)
{
    return zeros + __builtin_popcount(_mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_EQ_OQ));
}

INLINE Zeros count_double_zeros(Doubles values, Zeros zeros)
{
    return zeros + __builtin_popcount(_mm512_cmp_pd_mask(values, _mm512_setzero_pd(), _CMP_EQ_OQ));
}

INLINE int64_t total(Zeros zeros) { return zeros; }

#include "vectors.h"

static const Path path = PATH("avx512");

/* The check includes whether the operating system saves the registers. */
const Path *avx512_path(void)
{
    return avx2_path() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? &path : NULL;
}

#else

const Path *avx512_path(void) { return NULL; }

#endif

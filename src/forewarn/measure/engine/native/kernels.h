/* What the parts of the native backend share: the kinds of numbers, a row of sums, and the kernels of a code path.
 *
 * A tensor is read once, block by block, and all work on a block is done while it is in the cache. Blocks are added up
 * in a fixed order, so that a row does not depend on the number of threads. Within a block, every code path adds in the
 * same order, so that the row does not depend on the processor either. */

#ifndef FOREWARN_KERNELS_H
#define FOREWARN_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum {
    BLOCK = 4096, /* elements: 16 KiB of float32, half of a usual first-level cache */
    LANES = 16,   /* sums that run side by side within a block: element i belongs to lane i modulo 16 */
    NUM_BINS = 64,
    LOWEST_EXPONENT = -40, /* bin b counts magnitudes in [2^(b - 40), 2^(b - 39)), the first and the last one all beyond */
    FLOAT_BIAS = 127,      /* of the exponents of IEEE 754 numbers */
    DOUBLE_BIAS = 1023,
    FLOAT_MANTISSA = 23, /* bits */
    DOUBLE_MANTISSA = 52
};

typedef enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, NUM_DTYPES } Dtype;

static inline size_t element_size(Dtype dtype)
{
    return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2;
}

/* Over finite values, except for the number of the others. With no values, min is +inf and max is -inf. */
typedef struct {
    double sum, sum_squares, min, max;
    int64_t zeros, nonfinite;
} Row;

/* What the shape of a distribution needs besides a row: sums of third and fourth powers, over finite values. */
typedef struct {
    double cubes, fourths;
} Powers;

/* The code of a value says where a histogram counts it: its bin, and whether it is negative. A zero has the code of a
 * very small number of its sign. A count costs one store and little else, so two codes form a pair and pairs are
 * counted. */
typedef uint16_t Pair;
enum { CODE_BITS = 7, NUM_CODES = 1 << CODE_BITS, NUM_PAIRS = NUM_CODES * NUM_CODES, NEGATIVE = NUM_BINS };

/* The row of up to BLOCK values. If one is not finite, the only promise is that the sum of squares is not finite. */
typedef void RowKernel(const void *values, size_t length, Row *row);

/* The sums of powers of up to BLOCK finite values. */
typedef void PowerKernel(const void *values, size_t length, Powers *powers);

/* The codes of up to BLOCK finite values, paired in any order. An odd one out is paired with code 0, that of +0. */
typedef void PairKernel(const void *values, size_t length, Pair *pairs);

/* Squares of steps and of the values before them, in sums that run side by side: value i belongs to lane i modulo 16. */
typedef struct {
    double steps[LANES], before[LANES];
} Moved;

/* Adds values and their earlier values, whose number is a multiple of LANES. They need not be aligned. */
typedef void MovedKernel(const void *values, const void *before, size_t length, Moved *moved);

/* One way to read a block. */
typedef struct {
    const char *name;
    RowKernel *row[NUM_DTYPES];
    PairKernel *pairs[NUM_DTYPES];
    MovedKernel *moved[NUM_DTYPES];
    PowerKernel *powers[NUM_DTYPES];
} Path;

const Path *find_path(int number); /* by its number in interface.h; NULL if there is none */

extern const Path portable_path;
const Path *avx2_path(void); /* NULL where the processor or the compiler has none */
const Path *avx512_path(void);

/* The kernels for one kind of number, made from functions for any kind, so that the compiler knows the kind. */
#define KERNELS(target, kind, dtype)                                                                                  \
    target static void row_of_##kind(const void *values, size_t length, Row *row)                                     \
    {                                                                                                                 \
        row_of(dtype, values, length, row);                                                                           \
    }                                                                                                                 \
    target static void pairs_of_##kind(const void *values, size_t length, Pair *pairs)                                \
    {                                                                                                                 \
        pairs_of(dtype, values, length, pairs);                                                                       \
    }                                                                                                                 \
    target static void moved_of_##kind(const void *values, const void *before, size_t length, Moved *moved)           \
    {                                                                                                                 \
        moved_of(dtype, values, before, length, moved);                                                               \
    }                                                                                                                 \
    target static void powers_of_##kind(const void *values, size_t length, Powers *powers)                            \
    {                                                                                                                 \
        powers_of(dtype, values, length, powers);                                                                     \
    }

/* A path of these kernels, for all kinds. */
#define OF_ALL_KINDS(kernel)                                                                                          \
    {[FLOAT32] = kernel##_float32, [FLOAT64] = kernel##_float64, [FLOAT16] = kernel##_float16,                        \
     [BFLOAT16] = kernel##_bfloat16}
#define PATH(title)                                                                                                   \
    {.name = title, .row = OF_ALL_KINDS(row_of), .pairs = OF_ALL_KINDS(pairs_of), .moved = OF_ALL_KINDS(moved_of),    \
     .powers = OF_ALL_KINDS(powers_of)}

/* ---- plain C that every path uses ---- */

/* The values as doubles, which hold each of them exactly. They need not be aligned. */
void widen(Dtype dtype, const void *values, size_t length, double *wide);

/* Adds fewer than LANES values, the last of a block, to the row of those before. */
void add_tail(Dtype dtype, const void *values, size_t length, Row *row);

/* The same for the powers of the last values of a block. */
void add_powers(Dtype dtype, const void *values, size_t length, Powers *powers);

/* The same as the kernels, but slow, for values that may be anything. The pairs are those of the finite ones. */
void careful_row(Dtype dtype, const void *values, size_t length, Row *row);
void careful_powers(Dtype dtype, const void *values, size_t length, Powers *powers);
void careful_pairs(Dtype dtype, const void *values, size_t length, Pair *pairs);

/* How many of up to BLOCK values are -0. */
int64_t negative_zeros(Dtype dtype, const void *values, size_t length);

#endif

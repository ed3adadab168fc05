/* Functions that Python calls through ctypes. Tensors are passed as arrays of pointers, lengths and kinds (`Dtype`).
 *
 * Nothing is kept between calls, and the memory of a tensor is only read. */

#ifndef FOREWARN_INTERFACE_H
#define FOREWARN_INTERFACE_H

#include <stdint.h>

#if defined(__GNUC__)
#define EXPORTED __attribute__((visibility("default")))
#else
#define EXPORTED
#endif

enum { INTERFACE_VERSION = 5 }; /* changes with any function here: a library built from older sources is not used */

enum { DONE = 0, NO_MEMORY = 1, NO_SUCH_PATH = 2, NO_SUCH_PLACE = 3 };

EXPORTED int forewarn_interface_version(void);

/* The name of a code path that this processor has, best first; NULL after the last one. */
EXPORTED const char *forewarn_path_name(int path);

/* Rows [n × 7] of count, sum, sum of squares, min, max, zeros and nonfinite, by the code path with that number.
 *
 * With `histogram_blocks` above zero, up to that many evenly spaced blocks of a tensor are counted, from the first on.
 * A tensor with more than 16 times as many has one block in 16 counted. `histograms` [n × 2 × 64] holds the counts of
 * negative and of positive values by the power of two of their magnitude, `covered` [n] the number of values read.
 * Large work is shared by up to `num_threads` threads, with the same result. */
EXPORTED int forewarn_measure(int64_t num_tensors, const void *const *data, const int64_t *lengths,
                              const uint8_t *dtypes, int64_t histogram_blocks, int num_threads, int path, double *rows,
                              int64_t *histograms, int64_t *covered);

/* A sample of each tensor: the places of tensor i are places[offsets[i]] to places[offsets[i + 1]].
 *
 * If a tensor has as many places as values, it is copied whole in memory order, and its places are not read.
 * `sample` holds the values unconverted, tensor after tensor. */
EXPORTED int forewarn_gather(int64_t num_tensors, const void *const *data, const int64_t *lengths,
                             const uint8_t *dtypes, const int32_t *places, const int64_t *offsets, void *sample);

/* How far each tensor has moved at those places since, by the code path with that number: `moved` [n × 2] is
 * ‖new − old‖² and ‖old‖². */
EXPORTED int forewarn_gather_diff(int64_t num_tensors, const void *const *data, const int64_t *lengths,
                                  const uint8_t *dtypes, const int32_t *places, const int64_t *offsets,
                                  const void *sample, int path, double *moved);

/* What to measure in the units of a layer. */
enum { LOOK_AT_NOTHING, LOOK_FOR_FIRED, LOOK_FOR_INSIDE, LOOK_FOR_PEAKED, LOOK_AT_CHANNELS };

/* Where the statistics of one output of a layer are added up, call after call, and how the output is laid out. */
typedef struct {
    double *row;        /* [9]: count, sum, sum of squares, min, max, zeros, nonfinite, sum of cubes, of fourth powers */
    int64_t *positions; /* [1]: at how many positions each unit was read */
    int64_t look;       /* one of LOOK_… */
    double low, high;   /* the bounds of `inside` and `peaked` */
    uint8_t *fired;     /* [units]: set to 1 where a unit is not zero somewhere */
    double *sums;       /* inside [units]: values strictly between low and high; peaked [2]: positions whose largest unit
                           reaches `high`, and all; channels [2 × units]: sum of each, then sum of squares */
    int64_t outer, units, inner, every; /* a tensor [outer × units × inner], of which every nth row is read */
    int64_t dtype, path;
} Tally;

/* Reads every `every`-th row of a tensor, from the first on, and adds it to a tally. */
EXPORTED int forewarn_add_layer(const Tally *tally, const void *data);

/* How alike the rows [num × width] of a matrix are, of which there are at least two: `found` [2] is the mean cosine over
 * all pairs, and the effective rank of their differences. */
EXPORTED int forewarn_similarity(int64_t num, int64_t width, const double *rows, double *found);

/* Where one shape of a distribution ends and another begins: the constants of forewarn/distributions/shape.py. */
typedef struct {
    double least_values, collapsed_spread, shifted_mean, heavy_kurtosis, chance, valley, least_peak, significant, in_bin;
} ShapeBounds;

/* How the values of tensors are spread, from their histograms [n × 2 × 64], maybe of a sample, and rows [n × 7].
 *
 * Returns percentiles [percents × n] at rising percents, the number of each tensor's shape [n], and how many of its
 * values are zero [n]. If the counts of any tensor must be scaled up to stand for all of its values, `whole`
 * [n × 2 × 64] is filled for all tensors; `num_scaled` says how many were scaled. */
EXPORTED int forewarn_spread(int64_t num_tensors, const int64_t *counts, const double *rows, int64_t num_percents,
                             const int64_t *percents, const ShapeBounds *bounds, float *percentiles, float *shapes,
                             int64_t *zeros, int64_t *whole, int64_t *num_scaled);

#endif

/* Counting many values by sign and by the power of two of their magnitude. */

#ifndef FOREWARN_HISTOGRAM_H
#define FOREWARN_HISTOGRAM_H

#include "kernels.h"

/* Counts under way, of at most 2^32 values. Few of them are counted code by code, many in pairs. */
typedef struct {
    int many;
    int64_t negative_zeros, positive_zeros; /* counted as very small numbers, to be taken off again */
    uint32_t first[NUM_CODES], second[NUM_CODES];
    uint32_t pairs[NUM_PAIRS]; /* only if there are many: 64 KiB to clear and to add up */
} Counts;

void clear_counts(int64_t num_values, Counts *counts);

/* Counts the values of a block, whose row is known. */
void count_block(const Path *path, Dtype dtype, const void *values, size_t length, const Row *row, Counts *counts);

/* Adds what was counted to a histogram [2 × bins] of negative and of positive values. */
void add_counts(Counts *counts, int64_t *histogram);

/* From one block of a tensor that is counted to the next, so that there are so many of them, evenly spaced; of a large
 * tensor one block in MOST_STRIDE. */
int64_t block_stride(int64_t length, int64_t most_blocks);

/* How many of a tensor's elements are in a block that is counted; the first one always is. */
int64_t num_covered(int64_t length, int64_t most_blocks);

#endif

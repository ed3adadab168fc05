/* Counting many values by sign and by the power of two of their magnitude. */

#ifndef FOREWARN_HISTOGRAM_H
#define FOREWARN_HISTOGRAM_H

#include "kernels.h"

/* Counts in progress, of at most 2^32 values. Few values are counted code by code, many in pairs. */
typedef struct {
    int many;
    int64_t negative_zeros, positive_zeros; /* counted as very small numbers, subtracted at the end */
    uint32_t first[NUM_CODES], second[NUM_CODES];
    uint32_t pairs[NUM_PAIRS]; /* only for many values: clearing and adding up 64 KiB takes time */
} Counts;

void clear_counts(int64_t num_values, Counts *counts);

/* Counts the values of a block, given its row. */
void count_block(const Path *path, Dtype dtype, const void *values, size_t length, const Row *row, Counts *counts);

/* Adds the counts to a histogram [2 × bins] of negative and of positive values. */
void add_counts(Counts *counts, int64_t *histogram);

/* The distance between counted blocks that spaces up to `most_blocks` of them evenly. It is at most MOST_STRIDE, so
 * large tensors have more blocks counted. */
int64_t block_stride(int64_t length, int64_t most_blocks);

/* Number of a tensor's elements in counted blocks; the first block is always counted. */
int64_t num_covered(int64_t length, int64_t most_blocks);

#endif

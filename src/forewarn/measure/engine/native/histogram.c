#include "histogram.h"

#include <string.h>

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

enum {
    MANY = 3 * BLOCK, /* number of values from which a table of pairs is faster, as measured */
    MOST_STRIDE = 16  /* most rows of an embedding have no gradient: a few blocks would miss those that do */
};

void clear_counts(int64_t num_values, Counts *counts)
{
    counts->many = num_values >= MANY;
    counts->negative_zeros = counts->positive_zeros = 0;
    memset(counts->first, 0, sizeof counts->first);
    memset(counts->second, 0, sizeof counts->second);
    if (counts->many) {
        memset(counts->pairs, 0, sizeof counts->pairs);
    }
}

static inline void count_pair(unsigned pair, int many, Counts *counts)
{
    if (many) {
        counts->pairs[pair]++;
    } else {
        counts->first[pair % NUM_CODES]++;
        counts->second[pair / NUM_CODES]++;
    }
}

/* Eight pairs by eight instructions: a processor learns for each instruction separately which stores it must wait for.
 * Memory is idle meanwhile, so the next values are prefetched. */
static inline void count_pairs(const Pair *pairs, size_t num_pairs, const char *following, size_t size, int many,
                               Counts *counts)
{
    size_t i = 0;
    for (; i + 8 <= num_pairs; i += 8) {
        uint64_t fours[2];
        memcpy(fours, pairs + i, sizeof fours);
        PREFETCH(following + 2 * i * size);
        for (int k = 0; k < 8; k++) {
            count_pair((unsigned)(fours[k / 4] >> (16 * (k % 4)) & 0xFFFF), many, counts);
        }
    }
    for (; i < num_pairs; i++) {
        count_pair(pairs[i], many, counts);
    }
}

void count_block(const Path *path, Dtype dtype, const void *values, size_t length, const Row *row, Counts *counts)
{
    Pair pairs[BLOCK / 2];
    size_t num_codes = length - (size_t)row->nonfinite, num_pairs = (num_codes + 1) / 2, size = element_size(dtype);
    const char *following = (const char *)values + length * size;
    if (row->zeros == (int64_t)num_codes) {
        return;
    }
    if (row->nonfinite) {
        careful_pairs(dtype, values, length, pairs);
    } else {
        path->pairs[dtype](values, length, pairs);
    }
    if (counts->many) {
        count_pairs(pairs, num_pairs, following, size, 1, counts);
    } else {
        count_pairs(pairs, num_pairs, following, size, 0, counts);
    }
    int64_t negative = row->zeros ? negative_zeros(dtype, values, length) : 0;
    int64_t odd_one_out = (int64_t)(2 * num_pairs - num_codes);
    counts->negative_zeros += negative;
    counts->positive_zeros += row->zeros - negative + odd_one_out;
}

void add_counts(Counts *counts, int64_t *histogram)
{
    for (size_t second = 0; counts->many && second < NUM_CODES; second++) {
        const uint32_t *pairs = counts->pairs + second * NUM_CODES;
        uint32_t total = 0;
        for (size_t first = 0; first < NUM_CODES; first++) {
            counts->first[first] += pairs[first];
            total += pairs[first];
        }
        counts->second[second] += total;
    }
    for (size_t bin = 0; bin < NUM_BINS; bin++) {
        histogram[bin] += counts->first[NEGATIVE + bin] + counts->second[NEGATIVE + bin];
        histogram[NUM_BINS + bin] += counts->first[bin] + counts->second[bin];
    }
    histogram[0] -= counts->negative_zeros;
    histogram[NUM_BINS] -= counts->positive_zeros;
}

static int64_t num_parts(int64_t length, int64_t part) { return length / part + (length % part != 0); }

int64_t block_stride(int64_t length, int64_t most_blocks)
{
    int64_t stride = num_parts(num_parts(length, BLOCK), most_blocks);
    return stride < 1 ? 1 : stride > MOST_STRIDE ? MOST_STRIDE : stride;
}

int64_t num_covered(int64_t length, int64_t most_blocks)
{
    int64_t num_blocks = num_parts(length, BLOCK), stride = block_stride(length, most_blocks);
    int64_t num_counted = num_parts(num_blocks, stride);
    int last_is_counted = num_blocks > 0 && (num_blocks - 1) % stride == 0;
    return num_counted * BLOCK - (last_is_counted ? num_blocks * BLOCK - length : 0);
}

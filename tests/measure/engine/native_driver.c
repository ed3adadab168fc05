/* Exercises every entry point of the native library on memory of exactly the right size, for the sanitizers to watch.
 *
 * Every code path and number of threads must give the same bits; counts must add up. Prints the paths and "ok" and
 * returns 0. Where time is dear, the only argument is the length of the longest tensor. */

#include "interface.h"
#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BINS = 2 * NUM_BINS, COLUMNS = 7 };
#define ALL_BLOCKS ((int64_t)1 << 40) /* more than any tensor has */

static const int64_t lengths[] = {0,   1,   2,    15,   16,   17,   31,    32,    33,     63,
                                  255, 257, 4095, 4096, 4097, 8193, 12288, 16385, 262144, 262145};
enum { NUM_LENGTHS = sizeof lengths / sizeof lengths[0], LARGE = 1000 };
enum { NUM_SHORT = 2 * 64 + 2 /* lengths up to twice the values that the widest kernel reads at once, and beyond */ };

typedef enum { ORDINARY, SMALL, WILD, NUM_KINDS } Kind; /* of values */

static long num_expected;

static void expect(int condition, const char *what)
{
    num_expected++;
    if (!condition) {
        fprintf(stderr, "not as expected: %s\n", what);
        exit(1);
    }
}

static void *allocate(size_t size)
{
    void *memory = malloc(size); /* not one byte more: beyond is poisoned */
    expect(memory != NULL || size == 0, "enough memory");
    return memory;
}

static uint64_t random_bits(void)
{
    static uint64_t state = 88172645463325252u; /* xorshift64, as published by Marsaglia */
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Tensors of every length and kind, from an address that is aligned, or only to an element, or not at all. */
typedef struct {
    int64_t num_tensors;
    void **allocated;
    const void **data;
    int64_t *lengths;
    uint8_t *dtypes;
} Tensors;

/* A NaN is a NaN: which of two an addition passes on is up to the compiler. */
static int are_same(const double *some, const double *others, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        if (memcmp(some + i, others + i, sizeof *some) != 0 && !(isnan(some[i]) && isnan(others[i]))) {
            return 0;
        }
    }
    return 1;
}

/* Values of about one, or below two and down to denormal ones, or any bits: huge, infinite, NaN. Some are zeros of
 * either sign. */
static void fill(unsigned char *bytes, int64_t length, Dtype dtype, Kind kind)
{
    static const uint64_t one[] = {[FLOAT32] = 0x3F800000, [FLOAT64] = 0x3FF0000000000000, [FLOAT16] = 0x3C00,
                                   [BFLOAT16] = 0x3F80};
    static const uint64_t mantissa[] = {[FLOAT32] = 0x7FFFFF, [FLOAT64] = 0xFFFFFFFFFFFFF, [FLOAT16] = 0x3FF,
                                        [BFLOAT16] = 0x7F};
    size_t size = element_size(dtype);
    for (int64_t i = 0; i < length; i++) {
        uint64_t random = random_bits(), bits = random, highest_exponent_bit = UINT64_C(1) << (8 * size - 2);
        if (kind == ORDINARY) {
            bits = (random & mantissa[dtype]) | one[dtype];
        } else if (kind == SMALL) {
            bits &= ~highest_exponent_bit;
        }
        if (random % 11 == 0) {
            bits = random % 2 ? UINT64_C(1) << (8 * size - 1) : 0;
        }
        memcpy(bytes + (size_t)i * size, &bits, size); /* the lower bytes: this test is for little-endian machines */
    }
}

static Tensors make_tensors(const int64_t *wanted, size_t num_wanted, int64_t longest, Kind kind)
{
    Tensors made = {0};
    size_t n = 3 * num_wanted * NUM_DTYPES, at = 0; /* at most */
    made.allocated = allocate(n * sizeof *made.allocated);
    made.data = allocate(n * sizeof *made.data);
    made.lengths = allocate(n * sizeof *made.lengths);
    made.dtypes = allocate(n * sizeof *made.dtypes);
    for (int dtype = 0; dtype < NUM_DTYPES; dtype++) {
        size_t size = element_size((Dtype)dtype), shifts[] = {0, size, 1};
        for (size_t i = 0; i < num_wanted && wanted[i] <= longest; i++) {
            for (int k = wanted[i] < LARGE ? 0 : 2; k < 3; k++, at++) {
                unsigned char *memory = allocate(shifts[k] + (size_t)wanted[i] * size);
                fill(memory + shifts[k], wanted[i], (Dtype)dtype, kind);
                made.allocated[at] = memory;
                made.data[at] = memory + shifts[k];
                made.lengths[at] = wanted[i];
                made.dtypes[at] = (uint8_t)dtype;
            }
        }
    }
    made.num_tensors = (int64_t)at;
    return made;
}

static void free_tensors(Tensors *tensors)
{
    for (int64_t i = 0; i < tensors->num_tensors; i++) {
        free(tensors->allocated[i]);
    }
    free(tensors->allocated);
    free(tensors->data);
    free(tensors->lengths);
    free(tensors->dtypes);
}

static void check_counts(const Tensors *tensors, const double *rows, const int64_t *histograms, const int64_t *covered)
{
    for (int64_t i = 0; i < tensors->num_tensors; i++) {
        int64_t counted = 0;
        for (int bin = 0; bin < BINS; bin++) {
            expect(histograms[i * BINS + bin] >= 0, "no negative count");
            counted += histograms[i * BINS + bin];
        }
        expect((int64_t)rows[i * COLUMNS] == tensors->lengths[i], "every element is counted");
        expect(covered[i] == tensors->lengths[i], "every element is covered");
        expect(counted + (int64_t)(rows[i * COLUMNS + 5] + rows[i * COLUMNS + 6]) == covered[i], "counts add up");
    }
}

static void check_measure(const Tensors *tensors)
{
    size_t n = (size_t)tensors->num_tensors;
    size_t row_bytes = n * COLUMNS * sizeof(double), histogram_bytes = n * BINS * sizeof(int64_t);
    double *rows = allocate(row_bytes), *first_rows = allocate(row_bytes);
    int64_t *histograms = allocate(histogram_bytes), *first_histograms = allocate(histogram_bytes);
    int64_t *covered = allocate(n * sizeof *covered);
    static const int64_t limits[] = {0, 3, ALL_BLOCKS};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        int64_t blocks = limits[i];
        int is_first = 1;
        for (int path = 0; forewarn_path_name(path); path++) {
            for (int threads = 1; threads <= 3; threads += 2) {
                double *into = is_first ? first_rows : rows;
                int64_t *counts = blocks == 0 ? NULL : is_first ? first_histograms : histograms;
                int status = forewarn_measure(tensors->num_tensors, tensors->data, tensors->lengths, tensors->dtypes,
                                              blocks, threads, path, into, counts, blocks ? covered : NULL);
                expect(status == DONE, "measured");
                expect(is_first || memcmp(rows, first_rows, row_bytes) == 0, "the same rows");
                expect(is_first || !blocks || memcmp(histograms, first_histograms, histogram_bytes) == 0,
                       "the same histograms");
                is_first = 0;
            }
        }
        if (blocks == ALL_BLOCKS) {
            check_counts(tensors, first_rows, first_histograms, covered);
        }
    }
    expect(forewarn_measure(0, NULL, NULL, NULL, 0, 2, 0, NULL, NULL, NULL) == DONE, "nothing is measured");
    expect(forewarn_measure(0, NULL, NULL, NULL, 0, 1, 99, NULL, NULL, NULL) == NO_SUCH_PATH, "no such path");
    expect(forewarn_measure(0, NULL, NULL, NULL, 0, 1, -1, NULL, NULL, NULL) == NO_SUCH_PATH, "no such path");
    free(rows);
    free(first_rows);
    free(histograms);
    free(first_histograms);
    free(covered);
}

static int compared(const Tensors *tensors, const int32_t *places, const int64_t *offsets, const void *sample, int path,
                    double *moved)
{
    return forewarn_gather_diff(tensors->num_tensors, tensors->data, tensors->lengths, tensors->dtypes, places, offsets,
                                sample, path, moved);
}

static void check_sampling(const Tensors *tensors)
{
    size_t n = (size_t)tensors->num_tensors, sample_bytes = 0;
    int64_t *offsets = allocate((n + 1) * sizeof *offsets);
    offsets[0] = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t at_most = i % 2 ? tensors->lengths[i] / 2 : tensors->lengths[i]; /* all of it: taken as it lies there */
        int64_t num_places = at_most < 1000 ? at_most : 1000;
        offsets[i + 1] = offsets[i] + num_places;
        sample_bytes += (size_t)num_places * element_size((Dtype)tensors->dtypes[i]);
    }
    int32_t *places = allocate((size_t)offsets[n] * sizeof *places);
    for (size_t i = 0; i < n; i++) {
        for (int64_t at = offsets[i]; at < offsets[i + 1]; at++) {
            places[at] = (int32_t)(random_bits() % (uint64_t)tensors->lengths[i]);
        }
        if (offsets[i + 1] > offsets[i]) {
            places[offsets[i]] = (int32_t)tensors->lengths[i] - 1;
        }
    }
    unsigned char *sample = allocate(sample_bytes);
    double *moved = allocate(n * 2 * sizeof *moved), *first_moved = allocate(n * 2 * sizeof *moved);
    int status = forewarn_gather(tensors->num_tensors, tensors->data, tensors->lengths, tensors->dtypes, places, offsets,
                                 sample);
    expect(status == DONE, "gathered");
    for (int path = 0; forewarn_path_name(path); path++) {
        expect(compared(tensors, places, offsets, sample, path, moved) == DONE, "compared");
        for (size_t i = 0; i < n; i++) {
            expect(!(moved[2 * i] > 0), "nothing has moved");
        }
    }
    for (size_t i = 0; i < sample_bytes; i += 7) {
        sample[i] ^= 1;
    }
    for (int path = 0; forewarn_path_name(path); path++) {
        double *into = path ? moved : first_moved;
        expect(compared(tensors, places, offsets, sample, path, into) == DONE, "compared");
        expect(are_same(into, first_moved, 2 * n), "the same steps");
    }
    expect(compared(tensors, places, offsets, sample, 99, moved) == NO_SUCH_PATH, "no such path");
    int32_t outside[] = {-1, (int32_t)tensors->lengths[n - 1], INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        places[offsets[n] - 1] = outside[i];
        status = forewarn_gather(tensors->num_tensors, tensors->data, tensors->lengths, tensors->dtypes, places, offsets,
                                 sample);
        expect(status == NO_SUCH_PLACE, "a place outside is not gathered");
        status = compared(tensors, places, offsets, sample, 0, moved);
        expect(status == NO_SUCH_PLACE, "a place outside is not compared");
    }
    free(offsets);
    free(places);
    free(sample);
    free(moved);
    free(first_moved);
}

/* One tensor as [outer × units × inner] in several shapes, read whole and in every third row, looked at in every way. */
static void check_layer(const void *data, int64_t length, int dtype, int64_t units, int64_t inner, int64_t every)
{
    enum { MOMENTS = 9 };
    int64_t outer = length / (units * inner), num_read = (outer + every - 1) / every * units * inner;
    size_t num_units = (size_t)units, num_sums = 2 * num_units;
    double *first_sums = allocate(num_sums * sizeof *first_sums);
    for (int look = LOOK_AT_NOTHING; look <= LOOK_AT_CHANNELS; look++) {
        double first[MOMENTS] = {0};
        for (int path = 0; forewarn_path_name(path); path++) {
            double *row = allocate(MOMENTS * sizeof *row), *sums = allocate(num_sums * sizeof *sums);
            uint8_t *fired = allocate(num_units);
            memset(row, 0, MOMENTS * sizeof *row);
            memset(sums, 0, num_sums * sizeof *sums);
            memset(fired, 0, num_units);
            int64_t positions = 0;
            Tally tally = {row, &positions, look, 0.25, 1.75, fired, sums, outer, units, inner, every, dtype, path};
            expect(forewarn_add_layer(&tally, data) == DONE, "added");
            expect(positions * units == num_read, "every position is read");
            expect((int64_t)row[0] == num_read, "every row that is due is read");
            expect(path == 0 || memcmp(row, first, sizeof first) == 0, "the same moments");
            expect(path == 0 || are_same(sums, first_sums, num_sums), "the same sums of units");
            expect(look != LOOK_FOR_PEAKED || (int64_t)sums[1] * units == num_read, "every position is counted");
            memcpy(first, row, sizeof first);
            memcpy(first_sums, sums, num_sums * sizeof *sums);
            free(row);
            free(sums);
            free(fired);
        }
    }
    free(first_sums);
}

static void check_layers(const Tensors *tensors)
{
    for (int64_t i = 0; i < tensors->num_tensors; i++) {
        int64_t units[] = {1, 3, 300, tensors->lengths[i]}, inner[] = {1, 7, 257};
        for (int k = 0; k < 4 && tensors->lengths[i] < 20000; k++) {
            for (int j = 0; j < 3 && units[k]; j++) {
                for (int64_t every = 1; every <= 3; every += 2) {
                    check_layer(tensors->data[i], tensors->lengths[i], tensors->dtypes[i], units[k], inner[j], every);
                }
            }
        }
    }
    Tally nothing = {.units = 5, .inner = 1, .every = 1};
    expect(forewarn_add_layer(&nothing, NULL) == DONE, "an empty layer adds nothing");
    nothing.path = 99;
    expect(forewarn_add_layer(&nothing, NULL) == NO_SUCH_PATH, "no such path");
}

/* Of tensors and of ones that are four and a half times as large, so that their counts are scaled up. */
static void check_spread(const Tensors *tensors)
{
    static const int64_t percents[] = {1, 2, 5, 10, 25, 50, 75, 95, 99, 100}; /* more than are found at once */
    static const ShapeBounds bounds = {100, 1e-6, 2, 10, 100, 1.0 / 3, 0.05, 50, 1.14};
    enum { NUM_PERCENTS = sizeof percents / sizeof percents[0] };
    size_t n = (size_t)tensors->num_tensors;
    double *rows = allocate(n * COLUMNS * sizeof *rows);
    int64_t *histograms = allocate(n * BINS * sizeof *histograms), *whole = allocate(n * BINS * sizeof *whole);
    int64_t *covered = allocate(n * sizeof *covered), *zeros = allocate(n * sizeof *zeros), num_scaled = -1;
    float *percentiles = allocate(NUM_PERCENTS * n * sizeof *percentiles), *shapes = allocate(n * sizeof *shapes);
    int64_t *given_percents = allocate(sizeof percents);
    memcpy(given_percents, percents, sizeof percents);
    expect(forewarn_measure(tensors->num_tensors, tensors->data, tensors->lengths, tensors->dtypes, ALL_BLOCKS, 1, 0,
                            rows, histograms, covered)
               == DONE,
           "measured");
    for (int times = 1; times <= 2; times++) {
        int64_t num_to_scale = 0;
        for (size_t i = 0; i < n; i++) {
            int64_t nonzero = (int64_t)(rows[i * COLUMNS] - rows[i * COLUMNS + 5] - rows[i * COLUMNS + 6]);
            if (times == 2 && nonzero > 0 && i % 3) {
                rows[i * COLUMNS] += 3.5 * (double)nonzero;
                num_to_scale++;
            }
        }
        int status = forewarn_spread(tensors->num_tensors, histograms, rows, NUM_PERCENTS, given_percents, &bounds,
                                     percentiles, shapes, zeros, whole, &num_scaled);
        expect(status == DONE && num_scaled == num_to_scale, "scaled up what has to be");
        for (size_t i = 0; i < n; i++) {
            const double *row = rows + i * COLUMNS;
            const int64_t *own = histograms + i * BINS, *scaled = whole + i * BINS;
            int is_scaled = times == 2 && i % 3 != 0, is_empty = tensors->lengths[i] == (int64_t)row[6];
            for (int bin = 0; num_scaled && bin < BINS; bin++) {
                int64_t least = is_scaled ? own[bin] * 9 / 2 : own[bin]; /* rounded down, the other one to even */
                expect(scaled[bin] == least || (is_scaled && scaled[bin] == least + own[bin] % 2), "whole counts");
            }
            expect(zeros[i] == (int64_t)row[5], "zeros as they were");
            expect(isnan(shapes[i]) || (shapes[i] >= 0 && shapes[i] <= 5), "a shape");
            for (size_t k = 0; k < NUM_PERCENTS; k++) {
                float found = percentiles[k * n + i], before = k ? percentiles[(k - 1) * n + i] : found;
                expect(is_empty ? isnan(found) : found >= before, "percentiles rise");
                expect(is_empty || (found >= (float)row[3] && found <= (float)row[4]), "between minimum and maximum");
            }
        }
    }
    expect(forewarn_spread(0, NULL, NULL, NUM_PERCENTS, percents, &bounds, NULL, NULL, NULL, NULL, &num_scaled) == DONE
               && num_scaled == 0,
           "no tensors have no spread");
    free(rows);
    free(histograms);
    free(whole);
    free(covered);
    free(zeros);
    free(percentiles);
    free(shapes);
    free(given_percents);
}

int main(int num_arguments, char **arguments)
{
    int64_t longest = num_arguments > 1 ? atoll(arguments[1]) : INT64_MAX, short_lengths[NUM_SHORT];
    for (int i = 0; i < NUM_SHORT; i++) {
        short_lengths[i] = i;
    }
    expect(forewarn_interface_version() == INTERFACE_VERSION, "the version of these sources");
    for (Kind kind = 0; kind < NUM_KINDS; kind++) {
        Tensors tensors = make_tensors(short_lengths, NUM_SHORT, longest, kind);
        check_measure(&tensors);
        check_sampling(&tensors);
        check_spread(&tensors);
        free_tensors(&tensors);
        tensors = make_tensors(lengths, NUM_LENGTHS, longest, kind);
        check_measure(&tensors);
        check_sampling(&tensors);
        check_layers(&tensors);
        check_spread(&tensors);
        free_tensors(&tensors);
    }
    for (int path = 0; forewarn_path_name(path); path++) {
        printf("%s ", forewarn_path_name(path));
    }
    printf("ok\n%ld expectations held\n", num_expected);
    return 0;
}

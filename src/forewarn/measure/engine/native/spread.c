/* How the values of tensors are spread: the same as forewarn/distributions computes with numpy.
 *
 * Shapes and counts are bit-identical: everything that is compared there is computed in the same order here.
 * Percentiles use logarithms, which differ between libraries in the last bit of a double. */

#include "interface.h"
#include "kernels.h"

#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT, SUM, SUM_SQUARES, MIN, MAX, ZEROS, NONFINITE, NUM_COLUMNS }; /* of a row */
enum { HEALTHY, SHIFTED, HEAVY_TAILS, COLLAPSED, MULTI_MODAL, CONSTANT };  /* `Shape` of types.py */
enum {
    BOTH_SIDES = 2 * NUM_BINS,
    BELOW = 8, /* bins to search for modes, around that of the root mean square */
    WINDOW = BELOW + 4,
    NUM_CELLS = 2 * WINDOW + 1, /* both sides, with the cell around zero in the middle */
    AT_ONCE = 8                 /* percentiles */
};

/* As in percentiles.py. */
static const double least_width = 1e-6, even = 1e-4, half_ln2 = 0.34657359027997264;

/* The counts of one tensor by the power of two of the magnitude, and the range of bins that have any. */
typedef struct {
    int64_t counted, pooled[NUM_BINS];
    int first, last; /* bins; the last lies before the first if there are none */
} Summary;

static void summarize(const int64_t *counts, Summary *summary)
{
    summary->counted = 0;
    for (int bin = 0; bin < NUM_BINS; bin++) {
        summary->pooled[bin] = counts[bin] + counts[NUM_BINS + bin];
        summary->counted += summary->pooled[bin];
    }
    summary->first = 0;
    summary->last = NUM_BINS - 1;
    while (summary->first < NUM_BINS && summary->pooled[summary->first] == 0) {
        summary->first++;
    }
    while (summary->last >= summary->first && summary->pooled[summary->last] == 0) {
        summary->last--;
    }
}

/* ---- shapes ---- */

static double kurtosis(const Summary *summary, double in_bin)
{
    double second = 0, fourth = 0;
    for (int bin = summary->first; bin <= summary->last; bin++) {
        double pooled = (double)summary->pooled[bin];
        second = second / 4 + pooled;
        fourth = fourth / 16 + pooled;
    }
    return in_bin * (double)summary->counted * fourth / (second * second);
}

static double larger(double one, double other) { return one > other ? one : other; }
static double smaller(double one, double other) { return one < other ? one : other; }

/* Whether the density falls between two peaks and rises again. */
static int is_multi_modal(const int64_t *counts, int64_t counted, double mean_square, const ShapeBounds *bounds)
{
    double cells[NUM_CELLS], widths[NUM_CELLS], density[NUM_CELLS], peaks[NUM_CELLS], highest_before[NUM_CELLS];
    double least_peak = larger(bounds->significant, bounds->least_peak * (double)counted), highest = 0;
    int64_t around_zero = counted;
    int exponent;
    frexp(isfinite(mean_square) && mean_square > 0 ? sqrt(mean_square) : 1.0, &exponent);
    int lowest = exponent - 1 - LOWEST_EXPONENT - BELOW;
    for (int i = 0; i < WINDOW; i++) {
        int bin = lowest + i, inside = bin >= 0 && bin < NUM_BINS;
        int64_t negative = inside ? counts[bin] : 0, positive = inside ? counts[NUM_BINS + bin] : 0;
        cells[WINDOW - 1 - i] = (double)negative;
        cells[WINDOW + 1 + i] = (double)positive;
        widths[WINDOW - 1 - i] = widths[WINDOW + 1 + i] = (double)(1 << i) / (1 << BELOW);
        around_zero -= negative + positive;
    }
    cells[WINDOW] = (double)around_zero;
    widths[WINDOW] = 2.0 / (1 << BELOW);
    for (int i = 0; i < NUM_CELLS; i++) {
        density[i] = cells[i] / widths[i];
        peaks[i] = cells[i] >= least_peak ? density[i] : 0;
        highest_before[i] = highest = larger(highest, peaks[i]);
    }
    highest = 0;
    for (int i = NUM_CELLS - 1; i >= 0; i--) {
        highest = larger(highest, peaks[i]);
        double lower = smaller(highest, highest_before[i]);
        if (lower * widths[i] >= bounds->significant && density[i] < bounds->valley * lower) {
            return 1;
        }
    }
    return 0;
}

static float shape_of(const int64_t *counts, const Summary *summary, const double *row, const ShapeBounds *bounds)
{
    double counted = (double)summary->counted;
    double nonzero = row[COUNT] - row[ZEROS] - row[NONFINITE];
    double mean = row[SUM] / nonzero, mean_square = row[SUM_SQUARES] / nonzero;
    double variance = mean_square - mean * mean;
    double spread = sqrt(variance < 0 ? 0 : variance); /* NaN stays NaN */
    if (row[MIN] == row[MAX] && row[COUNT] - row[NONFINITE] >= bounds->least_values) {
        return CONSTANT;
    }
    if (counted < bounds->least_values) {
        return NAN;
    }
    if (spread <= bounds->collapsed_spread * fabs(mean)) {
        return COLLAPSED;
    }
    if (is_multi_modal(counts, summary->counted, mean_square, bounds)) {
        return MULTI_MODAL;
    }
    if (fabs(mean) >= bounds->shifted_mean * spread) {
        return SHIFTED;
    }
    int is_heavy = kurtosis(summary, bounds->in_bin) > bounds->heavy_kurtosis + bounds->chance / sqrt(counted);
    return is_heavy ? HEAVY_TAILS : HEALTHY;
}

/* ---- percentiles ---- */

/* The counts of one tensor in the order of the values, from large negative ones through the zeros to large positive
 * ones; and for each sign, the powers of two of its smallest and largest magnitude. */
typedef struct {
    int64_t cells[2 * NUM_BINS + 1];
    int middle, first_bin;
    double lowest[2], highest[2]; /* of negative, of positive values */
} Line;

static double logarithm(double value) { return value > 0 ? log2(value) : -INFINITY; }

static void lay_out(const int64_t *counts, const Summary *summary, int64_t zeros, const double *row, Line *line)
{
    int num_bins = summary->last - summary->first + 1;
    line->middle = num_bins;
    line->first_bin = summary->first;
    line->cells[num_bins] = zeros;
    for (int i = 0; i < num_bins; i++) {
        line->cells[num_bins - 1 - i] = counts[summary->first + i];
        line->cells[num_bins + 1 + i] = counts[NUM_BINS + summary->first + i];
    }
    line->lowest[0] = logarithm(-row[MAX]);
    line->lowest[1] = logarithm(row[MIN]);
    line->highest[0] = logarithm(-row[MIN]);
    line->highest[1] = logarithm(row[MAX]);
}

/* How steeply log2 of the density rises over a bin: from its two neighbors, or from the only one. */
static double rise_at(const Line *line, int at, double width)
{
    int side = at > line->middle ? 1 : -1, away = (at - line->middle) * side;
    double density = (double)line->cells[at] / width;
    double above = away < line->middle ? (double)line->cells[at + side] : 0;
    double below = away > 1 ? (double)line->cells[at - side] : 0;
    if (above > 0 && below > 0) {
        return 0.5 * log2(above / below);
    }
    if (above > 0 || below > 0) {
        return log2((above > 0 ? above : density) / (below > 0 ? below : density)) * (2 / (1 + width));
    }
    return 0;
}

/* Up to AT_ONCE values to find in a line. Each step is done for all of them before the next step. That is a quarter
 * faster, because a processor works on several logarithms at a time. */
typedef struct {
    int num, places[AT_ONCE];              /* the cells they are in */
    double inside[AT_ONCE];                /* the share of the cell that lies before the value */
    double lows[AT_ONCE], widths[AT_ONCE]; /* the bin in powers of two, cut off at minimum and maximum */
    double rises[AT_ONCE];                 /* of log2 of the density over it */
    double distances[AT_ONCE];             /* from its lower end, as a share of its width */
} Wanted;

/* The ⌈p · n⌉-th smallest of n values, where n is above zero. */
static void find_places(const Line *line, int64_t total, const int64_t *percents, Wanted *wanted)
{
    int64_t end = line->cells[0]; /* of the current cell, counted from the smallest value */
    for (int i = 0, at = 0; i < wanted->num; i++) {
        int64_t rank = total / 100 * percents[i] + (total % 100 * percents[i] + 99) / 100;
        while (end < rank) {
            end += line->cells[++at];
        }
        double here = (double)line->cells[at];
        wanted->places[i] = at;
        wanted->inside[i] = ((double)(rank - end) + here - 0.5) / here;
    }
}

static void find_bins(const Line *line, Wanted *wanted)
{
    for (int i = 0; i < wanted->num; i++) {
        int outward = wanted->places[i] - line->middle, positive = outward > 0;
        double exponent = abs(outward) - 1 + line->first_bin + LOWEST_EXPONENT, high = line->highest[positive];
        if (exponent < LOWEST_EXPONENT + NUM_BINS - 1) {
            high = smaller(exponent + 1, high);
        }
        wanted->lows[i] = larger(exponent, line->lowest[positive]);
        wanted->widths[i] = larger(high - wanted->lows[i], least_width);
        wanted->rises[i] = rise_at(line, wanted->places[i], wanted->widths[i]) * wanted->widths[i];
    }
}

/* How far into its bin each value lies. A falling density is read from its other end, from which it rises. */
static void find_distances(const Line *line, Wanted *wanted)
{
    double shares[AT_ONCE], factors[AT_ONCE], logarithms[AT_ONCE];
    for (int i = 0; i < wanted->num; i++) {
        int positive = wanted->places[i] > line->middle, falls = wanted->rises[i] < 0;
        shares[i] = positive != falls ? wanted->inside[i] : 1 - wanted->inside[i];
        factors[i] = exp2(fabs(wanted->rises[i]));
    }
    for (int i = 0; i < wanted->num; i++) {
        logarithms[i] = log2(1 + shares[i] * (factors[i] - 1));
    }
    for (int i = 0; i < wanted->num; i++) {
        double rise = fabs(wanted->rises[i]), linear = shares[i] + shares[i] * (1 - shares[i]) * rise * half_ln2;
        double distance = rise < even ? linear : logarithms[i] / rise;
        wanted->distances[i] = wanted->rises[i] < 0 ? 1 - distance : distance;
    }
}

/* Percentiles of one tensor, `stride` apart. */
static void write_percentiles(const Line *line, const Wanted *wanted, const double *row, int64_t stride,
                              float *percentiles)
{
    for (int i = 0; i < wanted->num; i++) {
        int outward = wanted->places[i] - line->middle;
        double magnitude = exp2(wanted->lows[i] + wanted->widths[i] * wanted->distances[i]);
        double found = outward > 0 ? magnitude : outward < 0 ? -magnitude : 0;
        found = found < row[MIN] ? row[MIN] : found;
        percentiles[i * stride] = (float)(found > row[MAX] ? row[MAX] : found);
    }
}

static void find_percentiles(const Line *line, int64_t total, const double *row, int64_t num_percents,
                             const int64_t *percents, int64_t stride, float *percentiles)
{
    for (int64_t i = 0; i < num_percents; i += AT_ONCE) {
        Wanted wanted;
        wanted.num = (int)(num_percents - i < AT_ONCE ? num_percents - i : AT_ONCE);
        find_places(line, total, percents + i, &wanted);
        find_bins(line, &wanted);
        find_distances(line, &wanted);
        write_percentiles(line, &wanted, row, stride, percentiles + i * stride);
    }
}

/* ---- functions that Python calls ---- */

static double or_zero(double value) { return isnan(value) ? 0 : value; }

/* Scales the counts of a sample up to all values; returns their sum. */
static int64_t scale_up(const int64_t *counts, double scale, int64_t *scaled)
{
    int64_t sum = 0;
    for (int bin = 0; bin < BOTH_SIDES; bin++) {
        scaled[bin] = llrint((double)counts[bin] * scale);
        sum += scaled[bin];
    }
    return sum;
}

int forewarn_spread(int64_t num_tensors, const int64_t *counts, const double *rows, int64_t num_percents,
                    const int64_t *percents, const ShapeBounds *bounds, float *percentiles, float *shapes,
                    int64_t *zeros, int64_t *whole, int64_t *num_scaled)
{
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    *num_scaled = 0;
    for (int64_t i = 0; i < num_tensors; i++) {
        const int64_t *own = counts + BOTH_SIDES * i;
        const double *row = rows + NUM_COLUMNS * i;
        double num_zeros = or_zero(row[ZEROS]), nonzero = or_zero(row[COUNT] - row[NONFINITE]) - num_zeros;
        Summary summary;
        summarize(own, &summary);
        shapes[i] = shape_of(own, &summary, row, bounds);
        zeros[i] = summary.counted == 0 && nonzero > 0 ? 0 : (int64_t)num_zeros;
        if (summary.counted > 0 && (double)summary.counted < nonzero) {
            if ((*num_scaled)++ == 0) {
                memcpy(whole, counts, (size_t)i * BOTH_SIDES * sizeof *whole);
            }
            summary.counted = scale_up(own, nonzero / (double)summary.counted, whole + BOTH_SIDES * i);
            own = whole + BOTH_SIDES * i;
        } else if (*num_scaled > 0) {
            memcpy(whole + BOTH_SIDES * i, own, BOTH_SIDES * sizeof *whole);
        }
        int64_t total = summary.counted + zeros[i];
        if (total > 0) {
            Line line;
            lay_out(own, &summary, zeros[i], row, &line);
            find_percentiles(&line, total, row, num_percents, percents, num_tensors, percentiles + i);
        } else {
            for (int64_t k = 0; k < num_percents; k++) {
                percentiles[k * num_tensors + i] = NAN;
            }
        }
    }
    fesetenv(&before);
    return DONE;
}

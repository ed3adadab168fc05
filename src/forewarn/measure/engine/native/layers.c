/* The output of a layer: its statistics with third and fourth powers, and its units, added up over calls.
 *
 * Of a large tensor, only evenly spaced rows are read: the stride costs nothing here, while torch would copy. */

#include "interface.h"
#include "kernels.h"

#include <fenv.h>
#include <math.h>
#include <string.h>

enum { PIECE = 256 /* values that are widened at once */ };

/* A tensor [outer × units × inner] in memory order. */
typedef struct {
    Dtype dtype;
    const char *data;
    int64_t outer, units, inner, every;
    const Path *path;
} Layer;

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static const char *plane(const Layer *layer, int64_t row, int64_t unit)
{
    return layer->data + (size_t)((row * layer->units + unit) * layer->inner) * element_size(layer->dtype);
}

/* ---- statistics ---- */

static void add_block(const Layer *layer, const char *values, size_t length, double *columns)
{
    Row row;
    Powers powers;
    layer->path->row[layer->dtype](values, length, &row);
    if (isfinite(row.sum_squares)) {
        layer->path->powers[layer->dtype](values, length, &powers);
    } else {
        careful_row(layer->dtype, values, length, &row);
        careful_powers(layer->dtype, values, length, &powers);
    }
    columns[0] += (double)length;
    columns[1] += row.sum;
    columns[2] += row.sum_squares;
    columns[3] = (row.min < columns[3] ? row.min : columns[3]) + 0.0; /* never -0 */
    columns[4] = (row.max > columns[4] ? row.max : columns[4]) + 0.0;
    columns[5] += (double)row.zeros;
    columns[6] += (double)row.nonfinite;
    columns[7] += powers.cubes;
    columns[8] += powers.fourths;
}

/* ---- units side by side: consecutive values in memory belong to consecutive units ---- */

static void mark_values(const double *values, size_t length, uint8_t *fired)
{
    for (size_t i = 0; i < length; i++) {
        fired[i] |= (uint8_t)(values[i] != 0);
    }
}

/* NaN counts as inside: it is not stuck at an end. */
static double is_inside(double value, const Tally *tally) { return value <= tally->low || value >= tally->high ? 0 : 1; }

static void count_values(const double *values, size_t length, const Tally *tally, double *inside)
{
    for (size_t i = 0; i < length; i++) {
        inside[i] += is_inside(values[i], tally);
    }
}

static void add_values(const double *values, size_t length, double *sums, double *squares)
{
    for (size_t i = 0; i < length; i++) {
        sums[i] += values[i];
        squares[i] += values[i] * values[i];
    }
}

static double largest(const double *values, size_t length, double known)
{
    for (size_t i = 0; i < length; i++) {
        known = values[i] > known ? values[i] : known;
    }
    return known;
}

static void add_row_of_units(const Layer *layer, int64_t row, const Tally *tally)
{
    double wide[PIECE], peak = -INFINITY;
    size_t units = (size_t)layer->units;
    const char *values = plane(layer, row, 0);
    for (size_t at = 0; at < units; at += PIECE) {
        size_t length = smaller(units - at, PIECE);
        if (tally->look == LOOK_FOR_FIRED && !memchr(tally->fired + at, 0, length)) {
            continue; /* all units have fired already, as in a healthy layer after a few rows */
        }
        widen(layer->dtype, values + at * element_size(layer->dtype), length, wide);
        if (tally->look == LOOK_AT_CHANNELS) {
            add_values(wide, length, tally->sums + at, tally->sums + units + at);
        } else if (tally->look == LOOK_FOR_PEAKED) {
            peak = largest(wide, length, peak);
        } else if (tally->look == LOOK_FOR_INSIDE) {
            count_values(wide, length, tally, tally->sums + at);
        } else {
            mark_values(wide, length, tally->fired + at);
        }
    }
    if (tally->look == LOOK_FOR_PEAKED) {
        tally->sums[0] += peak >= tally->high ? 1.0 : 0.0;
        tally->sums[1] += 1.0;
    }
}

/* ---- units in planes: a contiguous part of memory belongs to one unit ---- */

static void count_plane(const Layer *layer, int64_t row, int64_t unit, const Tally *tally)
{
    double wide[PIECE];
    size_t inner = (size_t)layer->inner;
    const char *values = plane(layer, row, unit);
    for (size_t at = 0; at < inner; at += PIECE) {
        size_t length = smaller(inner - at, PIECE);
        widen(layer->dtype, values + at * element_size(layer->dtype), length, wide);
        for (size_t i = 0; i < length; i++) {
            tally->sums[unit] += is_inside(wide[i], tally);
        }
    }
}

static void mark_plane(const Layer *layer, int64_t row, int64_t unit, const Tally *tally)
{
    double wide[PIECE];
    size_t inner = (size_t)layer->inner;
    const char *values = plane(layer, row, unit);
    for (size_t at = 0; at < inner && !tally->fired[unit]; at += PIECE) {
        size_t length = smaller(inner - at, PIECE);
        widen(layer->dtype, values + at * element_size(layer->dtype), length, wide);
        for (size_t i = 0; i < length; i++) {
            tally->fired[unit] |= (uint8_t)(wide[i] != 0);
        }
    }
}

static void add_plane(const Layer *layer, int64_t row, int64_t unit, const Tally *tally)
{
    size_t left = (size_t)layer->inner;
    const char *values = plane(layer, row, unit);
    while (left > 0) {
        size_t length = smaller(left, BLOCK);
        Row found;
        layer->path->row[layer->dtype](values, length, &found);
        tally->sums[unit] += found.sum;
        tally->sums[layer->units + unit] += found.sum_squares;
        values += length * element_size(layer->dtype);
        left -= length;
    }
}

static void count_peaks(const Layer *layer, int64_t row, const Tally *tally)
{
    double wide[PIECE], peaks[PIECE];
    size_t inner = (size_t)layer->inner;
    for (size_t at = 0; at < inner; at += PIECE) {
        size_t length = smaller(inner - at, PIECE);
        for (int64_t unit = 0; unit < layer->units; unit++) {
            widen(layer->dtype, plane(layer, row, unit) + at * element_size(layer->dtype), length, wide);
            for (size_t i = 0; i < length; i++) {
                peaks[i] = unit == 0 || wide[i] > peaks[i] ? wide[i] : peaks[i];
            }
        }
        for (size_t i = 0; i < length; i++) {
            tally->sums[0] += peaks[i] >= tally->high ? 1.0 : 0.0;
        }
    }
    tally->sums[1] += (double)inner;
}

static void add_planes(const Layer *layer, int64_t row, const Tally *tally)
{
    if (tally->look == LOOK_FOR_PEAKED) {
        count_peaks(layer, row, tally);
        return;
    }
    for (int64_t unit = 0; unit < layer->units; unit++) {
        if (tally->look == LOOK_AT_CHANNELS) {
            add_plane(layer, row, unit, tally);
        } else if (tally->look == LOOK_FOR_INSIDE) {
            count_plane(layer, row, unit, tally);
        } else {
            mark_plane(layer, row, unit, tally);
        }
    }
}

/* ---- a whole output ---- */

static void add_units(const Layer *layer, int64_t row, const Tally *tally)
{
    if (layer->inner == 1) {
        add_row_of_units(layer, row, tally);
    } else {
        add_planes(layer, row, tally);
    }
}

/* Adds rows that lie side by side, block by block; the units of a row are looked at while it is in the cache. */
static void add_rows(const Layer *layer, int64_t first, int64_t num_rows, const Tally *tally)
{
    size_t row_length = (size_t)(layer->units * layer->inner), whole = (size_t)num_rows * row_length, length;
    const char *values = plane(layer, first, 0);
    int64_t row = 0;
    for (size_t at = 0; at < whole; at += length) {
        length = smaller(whole - at, BLOCK);
        add_block(layer, values + at * element_size(layer->dtype), length, tally->row);
        for (; tally->look != LOOK_AT_NOTHING && (size_t)(row + 1) * row_length <= at + length; row++) {
            add_units(layer, first + row, tally);
        }
    }
}

/* ---- functions that Python calls ---- */

int forewarn_add_layer(const Tally *tally, const void *data)
{
    Layer layer = {(Dtype)tally->dtype, data,         tally->outer, tally->units,
                   tally->inner,        tally->every, find_path((int)tally->path)};
    if (!layer.path) {
        return NO_SUCH_PATH;
    }
    if (layer.outer * layer.units * layer.inner == 0) {
        return DONE;
    }
    fenv_t environment; /* of the host, which may treat denormals as zero */
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    if (layer.every == 1) {
        add_rows(&layer, 0, layer.outer, tally);
    } else {
        for (int64_t row = 0; row < layer.outer; row += layer.every) {
            add_rows(&layer, row, 1, tally);
        }
    }
    *tally->positions += (layer.outer + layer.every - 1) / layer.every * layer.inner;
    fesetenv(&environment);
    return DONE;
}

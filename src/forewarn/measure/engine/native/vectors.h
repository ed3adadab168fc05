/* The kernels of a code path with vectors, written once for vectors of any width.
 *
 * A file that includes this must define, for its instructions,
 *   TARGET, INLINE     how to declare a function that uses them, and one that is also inlined
 *   WIDE(operation)    the intrinsic of that name on whole vectors; HALF(operation) on vectors half as wide
 *   Floats, Doubles, Integers    whole vectors; HalfFloats half as wide ones
 *   FLOATS, DOUBLES    how many values they hold
 * and functions for what differs between widths:
 *   load_halves        as many 16-bit numbers as a vector holds floats; load_few_halves: as it holds doubles
 *   folded             the sum of all lanes: the upper half is always added to the lower half, as in portable.c
 *   least, largest, least_double, largest_double    of the values in a vector
 *   count_zeros, count_double_zeros, total          the number of zeros, in a separate type, Zeros
 *
 * Lane k of the portable path is element k of the vectors of an array side by side. */

#ifndef FOREWARN_VECTORS_H
#define FOREWARN_VECTORS_H

#include "kernels.h"

#include <math.h>
#include <string.h>

/* ---- loading values as floats or as doubles ---- */

INLINE Floats load_floats(Dtype dtype, const void *values, size_t at)
{
    if (dtype == FLOAT32) {
        return WIDE(loadu_ps)((const float *)values + at);
    }
    if (dtype == FLOAT16) {
        return WIDE(cvtph_ps)(load_halves((const uint16_t *)values + at));
    }
    return (Floats)WIDE(slli_epi32)(WIDE(cvtepu16_epi32)(load_halves((const uint16_t *)values + at)), 16);
}

/* Loads from memory again: that is cheaper than splitting a vector of floats. */
INLINE Doubles load_doubles(Dtype dtype, const void *values, size_t at)
{
    if (dtype == FLOAT64) {
        return WIDE(loadu_pd)((const double *)values + at);
    }
    if (dtype == FLOAT32) {
        return WIDE(cvtps_pd)(HALF(loadu_ps)((const float *)values + at));
    }
    if (dtype == FLOAT16) {
        return WIDE(cvtps_pd)(HALF(cvtph_ps)(load_few_halves((const uint16_t *)values + at)));
    }
    return WIDE(cvtps_pd)(
        (HalfFloats)HALF(slli_epi32)(HALF(cvtepu16_epi32)(load_few_halves((const uint16_t *)values + at)), 16));
}

/* ---- rows ---- */

INLINE void row_of_floats(Dtype dtype, const void *values, size_t length, Row *row)
{
    Doubles sum[LANES / DOUBLES] = {0}, squares[LANES / DOUBLES] = {0};
    Floats min = WIDE(set1_ps)(INFINITY), max = WIDE(set1_ps)(-INFINITY);
    Doubles one = WIDE(set1_pd)(1.0);
    Zeros zeros = {0};
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t k = 0; k < LANES / DOUBLES; k++) {
            Doubles wide = load_doubles(dtype, values, i + DOUBLES * k);
            /* `sum[k] + wide` on the multiply units: the units that only add are busy converting the next floats. */
            sum[k] = WIDE(fmadd_pd)(wide, one, sum[k]);
            /* The square of a float is exact in a double: fused or not, the result is the same. */
            squares[k] = WIDE(fmadd_pd)(wide, wide, squares[k]);
        }
        for (size_t k = 0; k < LANES / FLOATS; k++) {
            Floats value = load_floats(dtype, values, i + FLOATS * k);
            min = WIDE(min_ps)(value, min);
            max = WIDE(max_ps)(value, max);
            zeros = count_zeros(value, zeros);
        }
    }
    *row = (Row){folded(sum), folded(squares), least(min), largest(max), total(zeros), 0};
    add_tail(dtype, (const char *)values + whole * element_size(dtype), length - whole, row);
}

INLINE void row_of_doubles(const double *values, size_t length, Row *row)
{
    Doubles sum[LANES / DOUBLES] = {0}, squares[LANES / DOUBLES] = {0};
    Doubles min = WIDE(set1_pd)(INFINITY), max = WIDE(set1_pd)(-INFINITY);
    Zeros zeros = {0};
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t k = 0; k < LANES / DOUBLES; k++) {
            Doubles value = WIDE(loadu_pd)(values + i + DOUBLES * k);
            sum[k] += value;
            squares[k] += value * value;
            min = WIDE(min_pd)(value, min);
            max = WIDE(max_pd)(value, max);
            zeros = count_double_zeros(value, zeros);
        }
    }
    *row = (Row){folded(sum), folded(squares), least_double(min), largest_double(max), total(zeros), 0};
    add_tail(FLOAT64, values + whole, length - whole, row);
}

INLINE void row_of(Dtype dtype, const void *values, size_t length, Row *row)
{
    if (dtype == FLOAT64) {
        row_of_doubles(values, length, row);
    } else {
        row_of_floats(dtype, values, length, row);
    }
}

/* ---- powers: multiplied and added separately, as in the portable path ---- */

INLINE void powers_of(Dtype dtype, const void *values, size_t length, Powers *powers)
{
    Doubles cubes[LANES / DOUBLES] = {0}, fourths[LANES / DOUBLES] = {0};
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t k = 0; k < LANES / DOUBLES; k++) {
            Doubles value = load_doubles(dtype, values, i + DOUBLES * k), square = value * value;
            cubes[k] += square * value;
            fourths[k] += square * square;
        }
    }
    *powers = (Powers){folded(cubes), folded(fourths)};
    add_powers(dtype, (const char *)values + whole * element_size(dtype), length - whole, powers);
}

/* ---- codes: integers of 16 bits, twice as many in a vector as floats ---- */

enum { CODES = 2 * FLOATS };

/* The codes of values from their sign and exponent, as sign-extended integers. */
INLINE Integers codes_of(Integers tops, int exponent_mask, int bias)
{
    Integers exponent = tops & WIDE(set1_epi16)((short)exponent_mask);
    Integers above = WIDE(subs_epu16)(exponent, WIDE(set1_epi16)((short)(bias + LOWEST_EXPONENT)));
    Integers bin = WIDE(min_epi16)(above, WIDE(set1_epi16)(NUM_BINS - 1));
    Integers sign = WIDE(srli_epi16)(tops, 15 - (CODE_BITS - 1)) & WIDE(set1_epi16)(NEGATIVE);
    return bin | sign;
}

INLINE void store_pairs(Integers first, Integers second, Pair *pairs)
{
    Integers paired = first | WIDE(slli_epi16)(second, CODE_BITS);
    memcpy(pairs, &paired, sizeof paired);
}

/* Sign and exponent of as many floats as a vector has codes; the order does not matter. */
INLINE Integers tops_of_floats(Dtype dtype, const void *values, size_t at)
{
    Integers first = (Integers)load_floats(dtype, values, at);
    Integers second = (Integers)load_floats(dtype, values, at + FLOATS);
    return WIDE(packs_epi32)(WIDE(srai_epi32)(first, FLOAT_MANTISSA), WIDE(srai_epi32)(second, FLOAT_MANTISSA));
}

INLINE void pairs_of_floats(Dtype dtype, const void *values, size_t length, Pair *pairs)
{
    size_t whole = length - length % (2 * CODES);
    for (size_t i = 0; i < whole; i += 2 * CODES) {
        Integers first = codes_of(tops_of_floats(dtype, values, i), 0xFF, FLOAT_BIAS);
        Integers second = codes_of(tops_of_floats(dtype, values, i + CODES), 0xFF, FLOAT_BIAS);
        store_pairs(first, second, pairs + i / 2);
    }
    careful_pairs(dtype, (const char *)values + whole * element_size(dtype), length - whole, pairs + whole / 2);
}

/* The upper halves of the doubles of two vectors, which hold sign and exponent. */
INLINE Integers upper_halves(const double *values)
{
    Floats first = (Floats)WIDE(loadu_pd)(values), second = (Floats)WIDE(loadu_pd)(values + DOUBLES);
    return (Integers)WIDE(shuffle_ps)(first, second, 0xDD);
}

INLINE Integers tops_of_doubles(const double *values)
{
    return WIDE(packs_epi32)(WIDE(srai_epi32)(upper_halves(values), DOUBLE_MANTISSA - 32),
                             WIDE(srai_epi32)(upper_halves(values + FLOATS), DOUBLE_MANTISSA - 32));
}

INLINE void pairs_of_doubles(const double *values, size_t length, Pair *pairs)
{
    size_t whole = length - length % (2 * CODES);
    for (size_t i = 0; i < whole; i += 2 * CODES) {
        Integers first = codes_of(tops_of_doubles(values + i), 0x7FF, DOUBLE_BIAS);
        Integers second = codes_of(tops_of_doubles(values + i + CODES), 0x7FF, DOUBLE_BIAS);
        store_pairs(first, second, pairs + i / 2);
    }
    careful_pairs(FLOAT64, values + whole, length - whole, pairs + whole / 2);
}

INLINE void pairs_of(Dtype dtype, const void *values, size_t length, Pair *pairs)
{
    if (dtype == FLOAT64) {
        pairs_of_doubles(values, length, pairs);
    } else {
        pairs_of_floats(dtype, values, length, pairs);
    }
}

/* ---- steps ---- */

/* Two vectors of each sum at a time: all of them would not fit into the 16 registers of AVX2. */
INLINE void moved_of(Dtype dtype, const void *values, const void *before, size_t length, Moved *moved)
{
    for (size_t lane = 0; lane < LANES; lane += 2 * DOUBLES) {
        Doubles steps[2], squares[2];
        memcpy(steps, moved->steps + lane, sizeof steps);
        memcpy(squares, moved->before + lane, sizeof squares);
        for (size_t i = lane; i < length; i += LANES) {
            for (size_t k = 0; k < 2; k++) {
                Doubles old = load_doubles(dtype, before, i + DOUBLES * k);
                Doubles step = load_doubles(dtype, values, i + DOUBLES * k) - old;
                steps[k] += step * step;
                squares[k] += old * old;
            }
        }
        memcpy(moved->steps + lane, steps, sizeof steps);
        memcpy(moved->before + lane, squares, sizeof squares);
    }
}

KERNELS(TARGET, float32, FLOAT32)
KERNELS(TARGET, float64, FLOAT64)
KERNELS(TARGET, float16, FLOAT16)
KERNELS(TARGET, bfloat16, BFLOAT16)

#endif

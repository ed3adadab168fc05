/* How alike the rows of a matrix are: the mean cosine over all pairs, and the effective rank of their differences. */

#include "interface.h"
#include "kernels.h"

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>

static double dot(const double *a, const double *b, int64_t length)
{
    double lanes[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) {
        for (int64_t lane = 0; lane < LANES; lane++) {
            lanes[lane] += a[i + lane] * b[i + lane];
        }
    }
    for (; i < length; i++) {
        sum += a[i] * b[i];
    }
    for (int64_t lane = 0; lane < LANES; lane++) {
        sum += lanes[lane];
    }
    return sum;
}

static void add_to(double *sums, const double *values, double factor, int64_t length)
{
    for (int64_t i = 0; i < length; i++) {
        sums[i] += values[i] * factor;
    }
}

/* The mean over all pairs of different rows; `total` [width] is zero. Returns the sum of all squares. */
static double mean_cosine(int64_t num, int64_t width, const double *rows, double *total, double *cosine)
{
    double squares = 0;
    for (int64_t i = 0; i < num; i++) {
        double own = dot(rows + i * width, rows + i * width, width), norm = sqrt(own);
        squares += own;
        add_to(total, rows + i * width, 1 / (norm < DBL_MIN ? DBL_MIN : norm), width);
    }
    *cosine = (dot(total, total, width) - (double)num) / ((double)num * (double)(num - 1));
    return squares;
}

/* (Σλ)² / Σλ² of the eigenvalues λ of the covariance: from the products of all pairs of centred rows. */
static double effective_rank(int64_t num, int64_t width, const double *rows, double squares, double *mean,
                             double *centred)
{
    double trace = 0, all = 0;
    for (int64_t i = 0; i < num; i++) {
        add_to(mean, rows + i * width, 1, width);
    }
    for (int64_t i = 0; i < num; i++) {
        for (int64_t k = 0; k < width; k++) {
            centred[i * width + k] = rows[i * width + k] - mean[k] / (double)num;
        }
        for (int64_t j = 0; j <= i; j++) {
            double product = dot(centred + i * width, centred + j * width, width);
            all += (i == j ? 1 : 2) * product * product;
            trace += i == j ? product : 0;
        }
    }
    /* For identical rows, only rounding errors are left, whose rank means nothing. */
    return trace <= DBL_EPSILON * squares ? 1 : trace * trace / all;
}

int forewarn_similarity(int64_t num, int64_t width, const double *rows, double *found)
{
    double *space = calloc((size_t)((num + 2) * width), sizeof *space);
    if (!space) {
        return NO_MEMORY;
    }
    fenv_t environment;
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    double squares = mean_cosine(num, width, rows, space, &found[0]);
    found[1] = effective_rank(num, width, rows, squares, space + width, space + 2 * width);
    fesetenv(&environment);
    free(space);
    return DONE;
}

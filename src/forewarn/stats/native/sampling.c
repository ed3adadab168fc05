/* The sampled update: values of each tensor at fixed places, and how far they have moved since. */

#include "interface.h"
#include "kernels.h"

#include <fenv.h>
#include <string.h>

enum { PIECE = 256 /* places that are looked up before they are compared; a multiple of LANES */ };

static inline int copy_sized(const unsigned char *values, int64_t length, size_t size, const int32_t *places,
                             size_t num_places, unsigned char *out)
{
    int outside = 0;
    for (size_t i = 0; i < num_places; i++) {
        int64_t place = places[i];
        if (place < 0 || place >= length) {
            outside = 1;
            break;
        }
        memcpy(out + i * size, values + (size_t)place * size, size);
    }
    return outside ? NO_SUCH_PLACE : DONE;
}

/* The values at some places, as they are. One loop per size, so that each copy is one instruction. */
static int copy_places(Dtype dtype, const void *values, int64_t length, const int32_t *places, size_t num_places,
                       void *out)
{
    switch (element_size(dtype)) {
    case 2: return copy_sized(values, length, 2, places, num_places, out);
    case 4: return copy_sized(values, length, 4, places, num_places, out);
    default: return copy_sized(values, length, 8, places, num_places, out);
    }
}

/* A tensor with a place for each of its values is taken as it lies in memory. */
static int is_whole(size_t num_places, int64_t length) { return num_places > 0 && (int64_t)num_places == length; }

int forewarn_gather(int64_t num_tensors, const void *const *data, const int64_t *lengths, const uint8_t *dtypes,
                    const int32_t *places, const int64_t *offsets, void *sample)
{
    unsigned char *next = sample;
    for (int64_t i = 0; i < num_tensors; i++) {
        size_t num_places = (size_t)(offsets[i + 1] - offsets[i]), size = num_places * element_size((Dtype)dtypes[i]);
        if (is_whole(num_places, lengths[i])) {
            memcpy(next, data[i], size);
        } else {
            int status = copy_places((Dtype)dtypes[i], data[i], lengths[i], places + offsets[i], num_places, next);
            if (status != DONE) {
                return status;
            }
        }
        next += size;
    }
    return DONE;
}

/* Sums that run side by side: one alone would wait for each addition before the next. */
typedef struct {
    double step[LANES], old[LANES];
} Lanes;

static inline void add_to_lanes(const double *restrict new, const double *restrict old, size_t length,
                                Lanes *restrict lanes)
{
    size_t whole = length - length % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            double step = new[i + k] - old[i + k];
            lanes->step[k] += step * step;
            lanes->old[k] += old[i + k] * old[i + k];
        }
    }
    for (size_t i = whole; i < length; i++) {
        double step = new[i] - old[i];
        lanes->step[i - whole] += step * step;
        lanes->old[i - whole] += old[i] * old[i];
    }
}

/* ‖new − old‖² and ‖old‖² of one tensor, added up in an order that depends on nothing but the number of places. */
static int moved_since(Dtype dtype, const void *values, int64_t length, const int32_t *places, size_t num_places,
                       const unsigned char *sample, double *moved)
{
    double raw[PIECE], new[PIECE], old[PIECE];
    size_t size = element_size(dtype);
    int whole = is_whole(num_places, length);
    Lanes lanes = {0};
    for (size_t i = 0; i < num_places; i += PIECE) {
        size_t piece = num_places - i < PIECE ? num_places - i : PIECE;
        if (!whole) {
            int status = copy_places(dtype, values, length, places + i, piece, raw);
            if (status != DONE) {
                return status;
            }
        }
        widen(dtype, whole ? (const unsigned char *)values + i * size : (const void *)raw, piece, new);
        widen(dtype, sample + i * size, piece, old);
        add_to_lanes(new, old, piece, &lanes);
    }
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half; k++) {
            lanes.step[k] += lanes.step[k + half];
            lanes.old[k] += lanes.old[k + half];
        }
    }
    moved[0] = lanes.step[0];
    moved[1] = lanes.old[0];
    return DONE;
}

int forewarn_gather_diff(int64_t num_tensors, const void *const *data, const int64_t *lengths, const uint8_t *dtypes,
                         const int32_t *places, const int64_t *offsets, const void *sample, double *moved)
{
    const unsigned char *next = sample;
    int status = DONE;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* a step that is a denormal number is a step */
    for (int64_t i = 0; i < num_tensors && status == DONE; i++) {
        size_t num_places = (size_t)(offsets[i + 1] - offsets[i]);
        status = moved_since((Dtype)dtypes[i], data[i], lengths[i], places + offsets[i], num_places, next, moved + 2 * i);
        next += num_places * element_size((Dtype)dtypes[i]);
    }
    fesetenv(&before);
    return status;
}

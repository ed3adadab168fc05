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

/* The values at some places, unconverted. One loop per size, so that each copy is one instruction. */
static int copy_places(Dtype dtype, const void *values, int64_t length, const int32_t *places, size_t num_places,
                       void *out)
{
    switch (element_size(dtype)) {
    case 2: return copy_sized(values, length, 2, places, num_places, out);
    case 4: return copy_sized(values, length, 4, places, num_places, out);
    default: return copy_sized(values, length, 8, places, num_places, out);
    }
}

/* A tensor with a place for each of its values is copied in memory order. */
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

/* Adds the steps of one contiguous part of a tensor; the values after the last multiple of LANES one by one. */
static void add_moved(const Path *path, Dtype dtype, const unsigned char *values, const unsigned char *before,
                      size_t length, Moved *moved)
{
    size_t size = element_size(dtype), whole = length - length % LANES;
    double new[LANES], old[LANES];
    path->moved[dtype](values, before, whole, moved);
    widen(dtype, values + whole * size, length - whole, new);
    widen(dtype, before + whole * size, length - whole, old);
    for (size_t k = 0; k < length - whole; k++) {
        moved->steps[k] += (new[k] - old[k]) * (new[k] - old[k]);
        moved->before[k] += old[k] * old[k];
    }
}

/* ‖new − old‖² and ‖old‖² of one tensor, added up in an order that depends only on the number of places. */
static int moved_since(const Path *path, Dtype dtype, const void *values, int64_t length, const int32_t *places,
                       size_t num_places, const unsigned char *sample, double *found)
{
    Moved moved = {0};
    if (is_whole(num_places, length)) {
        add_moved(path, dtype, values, sample, num_places, &moved);
    } else {
        for (size_t i = 0; i < num_places; i += PIECE) {
            size_t piece = num_places - i < PIECE ? num_places - i : PIECE;
            double looked_up[PIECE]; /* of any kind: doubles are the largest */
            int status = copy_places(dtype, values, length, places + i, piece, looked_up);
            if (status != DONE) {
                return status;
            }
            add_moved(path, dtype, (const unsigned char *)looked_up, sample + i * element_size(dtype), piece, &moved);
        }
    }
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half; k++) {
            moved.steps[k] += moved.steps[k + half];
            moved.before[k] += moved.before[k + half];
        }
    }
    found[0] = moved.steps[0];
    found[1] = moved.before[0];
    return DONE;
}

int forewarn_gather_diff(int64_t num_tensors, const void *const *data, const int64_t *lengths, const uint8_t *dtypes,
                         const int32_t *places, const int64_t *offsets, const void *sample, int path, double *moved)
{
    const Path *found = find_path(path);
    const unsigned char *next = sample;
    int status = found ? DONE : NO_SUCH_PATH;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* a denormal step must not count as zero */
    for (int64_t i = 0; i < num_tensors && status == DONE; i++) {
        size_t num_places = (size_t)(offsets[i + 1] - offsets[i]);
        status = moved_since(found, (Dtype)dtypes[i], data[i], lengths[i], places + offsets[i], num_places, next,
                             moved + 2 * i);
        next += num_places * element_size((Dtype)dtypes[i]);
    }
    fesetenv(&before);
    return status;
}

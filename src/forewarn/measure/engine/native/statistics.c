/* Statistics of many tensors in one visit: the work is cut into chunks, which threads take in turn. */

#include "histogram.h"
#include "interface.h"
#include "kernels.h"

#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHUNK = 64 * BLOCK,            /* elements that a thread takes at once: about 50 µs */
    ELEMENTS_PER_THREAD = 1 << 19, /* below this, starting a thread takes longer than it saves */
    MAX_THREADS = 64,
    NUM_COLUMNS = 7
};

/* Up to CHUNK elements of one tensor, starting at a multiple of CHUNK, and their sums. */
typedef struct {
    int64_t tensor, begin;
    Row row;
} Chunk;

/* The arguments of a call, and its progress. */
typedef struct {
    const void *const *data;
    const int64_t *lengths;
    const uint8_t *dtypes;
    int64_t histogram_blocks;
    int64_t *histograms;
    const Path *path;
    Chunk *chunks;
    int64_t num_chunks;
    atomic_llong next_chunk;
    pthread_mutex_t adding_counts;
} Job;

/* ---- rows ---- */

static const Row empty_row = {.min = INFINITY, .max = -INFINITY};

static void add_row(const Row *part, Row *whole)
{
    whole->sum += part->sum;
    whole->sum_squares += part->sum_squares;
    whole->min = part->min < whole->min ? part->min : whole->min;
    whole->max = part->max > whole->max ? part->max : whole->max;
    whole->zeros += part->zeros;
    whole->nonfinite += part->nonfinite;
}

static void write_row(const Row *row, int64_t count, double *columns)
{
    columns[0] = (double)count;
    columns[1] = row->sum;
    columns[2] = row->sum_squares;
    columns[3] = row->min + 0.0; /* never -0: which of two zeros is smaller would be chance */
    columns[4] = row->max + 0.0;
    columns[5] = (double)row->zeros;
    columns[6] = (double)row->nonfinite;
}

/* ---- chunks ---- */

static void read_chunk(Job *job, Chunk *chunk)
{
    Dtype dtype = (Dtype)job->dtypes[chunk->tensor];
    const char *values = (const char *)job->data[chunk->tensor] + (size_t)chunk->begin * element_size(dtype);
    int64_t left = job->lengths[chunk->tensor] - chunk->begin, block = chunk->begin / BLOCK;
    int64_t stride = job->histogram_blocks ? block_stride(job->lengths[chunk->tensor], job->histogram_blocks) : 0;
    Counts counts;
    left = left < CHUNK ? left : CHUNK;
    if (stride) {
        clear_counts(left / stride, &counts);
    }
    chunk->row = empty_row;
    for (; left > 0; left -= BLOCK, block++) {
        size_t length = (size_t)(left < BLOCK ? left : BLOCK);
        Row row;
        job->path->row[dtype](values, length, &row);
        if (!isfinite(row.sum_squares)) {
            careful_row(dtype, values, length, &row);
        }
        if (stride && block % stride == 0) {
            count_block(job->path, dtype, values, length, &row, &counts);
        }
        add_row(&row, &chunk->row);
        values += length * element_size(dtype);
    }
    if (stride) {
        pthread_mutex_lock(&job->adding_counts);
        add_counts(&counts, job->histograms + 2 * NUM_BINS * chunk->tensor);
        pthread_mutex_unlock(&job->adding_counts);
    }
}

/* What each thread does. */
static void *read_chunks(void *given)
{
    Job *job = given;
    for (int64_t at; (at = atomic_fetch_add(&job->next_chunk, 1)) < job->num_chunks;) {
        read_chunk(job, &job->chunks[at]);
    }
    return NULL;
}

static void read_all(Job *job, int64_t num_threads)
{
    pthread_t threads[MAX_THREADS];
    int num_started = 0;
    while (num_started + 1 < num_threads && num_started < MAX_THREADS
           && pthread_create(&threads[num_started], NULL, read_chunks, job) == 0) {
        num_started++;
    }
    read_chunks(job); /* this thread works too, and suffices if no other can be started */
    for (int i = 0; i < num_started; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* ---- tensors: functions that Python calls ---- */

int forewarn_interface_version(void) { return INTERFACE_VERSION; }

const Path *find_path(int number)
{
    const Path *best_first[] = {avx512_path(), avx2_path(), &portable_path};
    int at = 0;
    for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++) {
        if (best_first[i] && at++ == number) {
            return best_first[i];
        }
    }
    return NULL;
}

const char *forewarn_path_name(int number)
{
    const Path *path = find_path(number);
    return path ? path->name : NULL;
}

static int64_t num_chunks_of(int64_t length) { return (length + CHUNK - 1) / CHUNK; }

static void read_tensors(Job *job, int64_t num_tensors, int num_threads, double *rows)
{
    int64_t num_elements = 0;
    for (int64_t i = 0, at = 0; i < num_tensors; i++) {
        num_elements += job->lengths[i];
        for (int64_t begin = 0; begin < job->lengths[i]; begin += CHUNK) {
            job->chunks[at++] = (Chunk){.tensor = i, .begin = begin};
        }
    }
    int64_t useful_threads = num_elements / ELEMENTS_PER_THREAD;
    read_all(job, useful_threads < num_threads ? useful_threads : num_threads);

    const Chunk *chunk = job->chunks;
    for (int64_t i = 0; i < num_tensors; i++) {
        Row row = empty_row;
        for (int64_t left = num_chunks_of(job->lengths[i]); left > 0; left--) {
            add_row(&(chunk++)->row, &row);
        }
        write_row(&row, job->lengths[i], rows + NUM_COLUMNS * i);
    }
}

int forewarn_measure(int64_t num_tensors, const void *const *data, const int64_t *lengths, const uint8_t *dtypes,
                     int64_t histogram_blocks, int num_threads, int path, double *rows, int64_t *histograms,
                     int64_t *covered)
{
    Job job = {.data = data, .lengths = lengths, .dtypes = dtypes, .histogram_blocks = histogram_blocks,
               .histograms = histograms, .path = find_path(path), .adding_counts = PTHREAD_MUTEX_INITIALIZER};
    if (!job.path) {
        return NO_SUCH_PATH;
    }
    for (int64_t i = 0; i < num_tensors; i++) {
        job.num_chunks += num_chunks_of(lengths[i]);
    }
    job.chunks = malloc((size_t)job.num_chunks * sizeof *job.chunks + 1); /* + 1: malloc(0) may return NULL */
    if (!job.chunks) {
        return NO_MEMORY;
    }
    if (histogram_blocks) {
        memset(histograms, 0, (size_t)num_tensors * 2 * NUM_BINS * sizeof *histograms);
        for (int64_t i = 0; i < num_tensors; i++) {
            covered[i] = num_covered(lengths[i], histogram_blocks);
        }
    }
    fenv_t environment; /* of the host, which may treat denormals as zero; threads inherit the default one */
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    read_tensors(&job, num_tensors, num_threads, rows);
    fesetenv(&environment);
    free(job.chunks);
    return DONE;
}

/* Convolution with separate kernels for every task: the product, and its derivatives by images and by kernels.
 *
 * Every tap of a kernel joins pairs of pixels: one of the input, one of the output. The product is a sum over taps of
 * small matrix products over these pairs. So nothing is gathered in memory, and padding costs nothing.
 */

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* Pixels of a block. All its products are added up before the next block: its inputs and outputs fit the cache. */
enum { BLOCK_PIXELS = 64 };

/* For every tap of the kernel, the pairs (input pixel, output pixel) that it joins in a group of samples, in the
 * order of the output rows. The pairs of a row begin at `first[tap][row]`. `in` and `out` are offsets of a pixel's
 * channels. */
struct pairs { int64_t group, rows, block; int32_t *in, *out, *first; };

static struct pairs make_pairs(const struct geometry *g) {
    struct pairs p;
    int64_t pixels = g->out_height * g->out_width, taps = tap_count(g);
    p.group = BLOCK_PIXELS / pixels > 1 ? BLOCK_PIXELS / pixels : 1;
    if (p.group > g->samples) p.group = g->samples;
    int64_t in = g->height * g->width * g->inputs, out = pixels * g->outputs, image = in > out ? in : out;
    while (p.group > 1 && p.group * image > INT32_MAX) p.group--;  /* offsets have 32 bits */
    p.rows = p.group * g->out_height;
    p.block = BLOCK_PIXELS / g->out_width > 1 ? BLOCK_PIXELS / g->out_width : 1;
    int64_t capacity = taps * p.group * pixels;
    p.in = malloc((2 * capacity + taps * (p.rows + 1)) * sizeof(int32_t));
    p.out = p.in + capacity;
    p.first = p.out + capacity;
    int32_t found = 0;
    for (int64_t tap = 0; tap < taps; tap++) {
        for (int64_t row = 0; row < p.rows; row++) {
            p.first[tap * (p.rows + 1) + row] = found;
            int64_t sample = row / g->out_height;
            int64_t y = row % g->out_height * g->stride + tap / g->kernel_width - g->padding;
            if (y < 0 || y >= g->height) continue;
            for (int64_t column = 0; column < g->out_width; column++) {
                int64_t x = column * g->stride + tap % g->kernel_width - g->padding;
                if (x < 0 || x >= g->width) continue;
                p.in[found] = (int32_t)(((sample * g->height + y) * g->width + x) * g->inputs);
                p.out[found++] = (int32_t)((row * g->out_width + column) * g->outputs);
            }
        }
        p.first[tap * (p.rows + 1) + p.rows] = found;
    }
    return p;
}

/* The number of pairs of a tap whose output rows lie in [from, to), and the first of them. */
INLINE int32_t pairs_of(const struct pairs *p, int64_t tap, int64_t from, int64_t to, int32_t *start) {
    const int32_t *first = p->first + tap * (p->rows + 1);
    *start = first[from];
    return first[to] - first[from];
}

/* c[ci[r]] += a[ai[r]] · b for a few rows r; a row of c has vectors × LANES numbers. */
INLINE void rows_tile(const int rows, const int vectors, int64_t depth, const REAL *a, const int32_t *ai, REAL *c,
                      const int32_t *ci, const REAL *b, int64_t width) {
    vector sum[ROWS][VECTORS];
    const REAL *row[ROWS];
    EACH(r, rows) {
        row[r] = a + ai[r];
        EACH(v, vectors) sum[r][v] = load(c + ci[r] + v * LANES);
    }
    for (int64_t k = 0; k < depth; k++, b += width) {
        vector operand[VECTORS];
        EACH(v, vectors) operand[v] = load(b + v * LANES);
        EACH(r, rows)
            EACH(v, vectors) sum[r][v] += row[r][k] * operand[v];
    }
    EACH(r, rows)
        EACH(v, vectors) store(c + ci[r] + v * LANES, sum[r][v]);
}

/* c[r] += Σ over pairs p of a[ai[p]][r] · b[bi[p]] for a few rows r of c. */
INLINE void outer_tile(const int rows, const int vectors, int64_t pairs, const REAL *a, const int32_t *ai,
                       const REAL *b, const int32_t *bi, REAL *c, int64_t width) {
    vector sum[ROWS][VECTORS];
    EACH(r, rows)
        EACH(v, vectors) sum[r][v] = load(c + r * width + v * LANES);
    for (int64_t p = 0; p < pairs; p++) {
        const REAL *left = a + ai[p], *right = b + bi[p];
        vector operand[VECTORS];
        EACH(v, vectors) operand[v] = load(right + v * LANES);
        EACH(r, rows)
            EACH(v, vectors) sum[r][v] += left[r] * operand[v];
    }
    EACH(r, rows)
        EACH(v, vectors) store(c + r * width + v * LANES, sum[r][v]);
}

/* c[ci] += a[ai] · b over a list of pairs; a row of a has `depth` numbers, a row of c has `width`. */
static void add_rows(int64_t pairs, int64_t depth, int64_t width, const REAL *a, const int32_t *ai, REAL *c,
                     const int32_t *ci, const REAL *b) {
    for (int64_t column = 0; column < width;) {
        const int vectors = vectors_left(width - column);
        for (int64_t done = 0; done < pairs;) {
            const int rows = next_rows(pairs - done);
#define TILE(R, V) rows_tile(R, V, depth, a, ai + done, c + column, ci + done, b + column, width)
            WITH_TILE(rows, vectors, TILE)
#undef TILE
            done += rows;
        }
        column += vectors * LANES;
    }
}

/* c [height, width] += Σ over pairs of a[ai] ⊗ b[bi]. */
static void add_outer(int64_t pairs, int64_t height, int64_t width, const REAL *a, const int32_t *ai, const REAL *b,
                      const int32_t *bi, REAL *c) {
    for (int64_t column = 0; column < width;) {
        const int vectors = vectors_left(width - column);
        for (int64_t done = 0; done < height;) {
            const int rows = next_rows(height - done);
#define TILE(R, V) outer_tile(R, V, pairs, a + done, ai, b + column, bi, c + done * width + column, width)
            WITH_TILE(rows, vectors, TILE)
#undef TILE
            done += rows;
        }
        column += vectors * LANES;
    }
}

struct convolution {
    const struct geometry *g;
    struct pairs pairs;
    int64_t groups, parts, weight_step;
    const REAL *x, *weight, *gy;
    REAL *result;
};

/* The group of samples of a unit: its first sample, and its number of output rows. */
INLINE int64_t group_of(const struct convolution *c, int64_t unit, int64_t *sample) {
    *sample = unit / c->groups * c->g->samples + unit % c->groups * c->pairs.group;
    int64_t left = c->g->samples - unit % c->groups * c->pairs.group;
    return (left < c->pairs.group ? left : c->pairs.group) * c->g->out_height;
}

/* The product of a group of samples, or with `backward` the input gradient: rows of one side, times the kernel of a
 * tap, are added to rows of the other side. */
static void rows_unit(const struct convolution *c, int64_t unit, const int backward) {
    const struct geometry *g = c->g;
    int64_t sample, rows = group_of(c, unit, &sample), taps = tap_count(g);
    int64_t in_size = g->height * g->width * g->inputs, out_size = g->out_height * g->out_width * g->outputs;
    int64_t size = backward ? in_size : out_size;
    int64_t depth = backward ? g->outputs : g->inputs, width = backward ? g->inputs : g->outputs;
    const REAL *a = backward ? c->gy + sample * out_size : c->x + sample * in_size;
    const REAL *weight = c->weight + unit / c->groups * c->weight_step;
    const int32_t *a_pairs = backward ? c->pairs.out : c->pairs.in, *b_pairs = backward ? c->pairs.in : c->pairs.out;
    REAL *result = c->result + sample * size;
    memset(result, 0, rows / g->out_height * size * sizeof(REAL));
    for (int64_t from = 0; from < rows; from += c->pairs.block) {
        int64_t to = from + c->pairs.block < rows ? from + c->pairs.block : rows;
        for (int64_t tap = 0; tap < taps; tap++) {
            int32_t start, count = pairs_of(&c->pairs, tap, from, to, &start);
            add_rows(count, depth, width, a, a_pairs + start, result, b_pairs + start, weight + tap * depth * width);
        }
    }
}

static void product_unit(const void *job, int64_t unit) { rows_unit(job, unit, 0); }
static void input_gradient_unit(const void *job, int64_t unit) { rows_unit(job, unit, 1); }

/* The weight gradient of all taps of a task; if there are more threads than tasks, of one tap. */
static void weight_gradient_unit(const void *job, int64_t unit) {
    const struct convolution *c = job;
    const struct geometry *g = c->g;
    int64_t taps = tap_count(g), parts = c->parts, task = unit / parts, kernel = g->inputs * g->outputs;
    int64_t first_tap = parts == 1 ? 0 : unit % parts, last_tap = parts == 1 ? taps : first_tap + 1;
    REAL *gw = c->result + task * taps * kernel;
    memset(gw + first_tap * kernel, 0, (last_tap - first_tap) * kernel * sizeof(REAL));
    for (int64_t group = task * c->groups; group < (task + 1) * c->groups; group++) {
        int64_t sample, rows = group_of(c, group, &sample);
        const REAL *x = c->x + sample * g->height * g->width * g->inputs;
        const REAL *gy = c->gy + sample * g->out_height * g->out_width * g->outputs;
        for (int64_t from = 0; from < rows; from += c->pairs.block) {
            int64_t to = from + c->pairs.block < rows ? from + c->pairs.block : rows;
            for (int64_t tap = first_tap; tap < last_tap; tap++) {
                int32_t start, count = pairs_of(&c->pairs, tap, from, to, &start);
                add_outer(count, g->inputs, g->outputs, x, c->pairs.in + start, gy, c->pairs.out + start,
                          gw + tap * kernel);
            }
        }
    }
}

static void convolve(struct convolution c, int64_t units, int64_t threads, unit_body body) {
    c.pairs = make_pairs(c.g);
    c.groups = (c.g->samples + c.pairs.group - 1) / c.pairs.group;
    for_each_unit(units ? units : c.g->tasks * c.groups, threads, body, &c);
    free(c.pairs.in);
}

/* y = x ∗ w; weight_step is 0 if all tasks share one kernel. */
void product(const struct geometry *g, const REAL *x, const REAL *weight, int64_t weight_step, REAL *y,
             int64_t threads) {
    convolve((struct convolution){.g = g, .weight_step = weight_step, .x = x, .weight = weight, .result = y}, 0,
             threads, product_unit);
}

struct transposition { int64_t inputs, outputs; const REAL *from; REAL *to; };

/* Transposes LANES × LANES numbers by exchanging ever smaller squares. clang has no shuffle by variable places. */
INLINE void transpose_square(const REAL *from, int64_t from_width, REAL *to, int64_t to_width) {
#ifdef __clang__
    EACH(r, LANES)
        EACH(c, LANES) to[c * to_width + r] = from[r * from_width + c];
#else
    vector row[LANES];
    EACH(r, LANES) row[r] = load(from + r * from_width);
    EACH(round, LOG_LANES) {
        const int half = LANES >> (round + 1);
        mask low, high;
        EACH(lane, LANES) {
            low[lane] = lane & half ? LANES + lane - half : lane;
            high[lane] = lane & half ? LANES + lane : lane + half;
        }
        EACH(r, LANES)
            if (!(r & half)) {
                vector a = row[r], b = row[r + half];
                row[r] = __builtin_shuffle(a, b, low);
                row[r + half] = __builtin_shuffle(a, b, high);
            }
    }
    EACH(r, LANES) store(to + r * to_width, row[r]);
#endif
}

void transpose(int64_t inputs, int64_t outputs, const REAL *from, REAL *to) {
    for (int64_t o = 0; o < outputs; o += LANES)
        for (int64_t i = 0; i < inputs; i += LANES)
            transpose_square(from + i * outputs + o, outputs, to + o * inputs + i, inputs);
}

static void transpose_unit(const void *job, int64_t unit) {
    const struct transposition *t = job;
    int64_t kernel = t->inputs * t->outputs;
    transpose(t->inputs, t->outputs, t->from + unit * kernel, t->to + unit * kernel);
}

/* The derivative of ⟨gy, x ∗ w⟩ by x. */
void input_gradient(const struct geometry *g, const REAL *gy, const REAL *weight, int64_t weight_step, REAL *gx,
                    int64_t threads) {
    int64_t kernels = (weight_step ? g->tasks : 1) * tap_count(g);
    REAL *transposed = malloc(kernels * g->inputs * g->outputs * sizeof(REAL));
    struct transposition t = {g->inputs, g->outputs, weight, transposed};
    for_each_unit(kernels, threads, transpose_unit, &t);
    convolve((struct convolution){.g = g, .weight_step = weight_step, .gy = gy, .weight = transposed, .result = gx},
             0, threads, input_gradient_unit);
    free(transposed);
}

/* The derivative of ⟨gy, x ∗ w⟩ by w. */
void weight_gradient(const struct geometry *g, const REAL *gy, const REAL *x, REAL *gw, int64_t threads) {
    int64_t parts = threads > g->tasks ? tap_count(g) : 1;
    convolve((struct convolution){.g = g, .parts = parts, .x = x, .gy = gy, .result = gw}, g->tasks * parts, threads,
             weight_gradient_unit);
}

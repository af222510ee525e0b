/* Convolutions of one task. Pixels that the same taps reach are computed together, in tiles that fill the registers;
 * each pixel is one sum over taps and channels, in the same order in every tile: so neither the samples beside it nor the
 * threads change its bits. */

#include <stdlib.h>
#include <string.h>

#include "taps.h"
#include "winograd.h"

/* What is computed before the next block, so that its operands stay in the cache: numbers of some samples, and pixels of
 * a kernel gradient. */
enum { PRODUCT_BLOCK = 65536, JOINT_PIXELS = 128 };

/* Output pixels of a block of rows, for BY_ROWS. */
enum { ROW_PIXELS = 64 };

/* Length of a sum in registers; longer sums are continued from memory, so that their kernels stay in the cache. */
enum { SUM_LENGTH = 1024 };

/* Plans */

/* The taps that reach a pixel: their numbers, and where the operand's pixels begin. */
struct reached { int taps; int32_t *tap, *at; };

static void reach_of_output(const struct geometry *g, int64_t row, int64_t column, struct reached *r) {
    for (int64_t tap = 0; tap < tap_count(g); tap++) {
        int64_t y = row * g->stride + tap / g->kernel_width - g->padding;
        int64_t x = column * g->stride + tap % g->kernel_width - g->padding;
        if (y < 0 || y >= g->height || x < 0 || x >= g->width) continue;
        r->tap[r->taps] = (int32_t)tap;
        r->at[r->taps++] = (int32_t)((y * g->width + x) * g->inputs);
    }
}

/* The taps are in the order of blocks of `block` output numbers, and within a block in their own. */
static void reach_of_input(const struct geometry *g, int64_t row, int64_t column, int64_t block, struct reached *r) {
    for (int64_t tap = 0; tap < tap_count(g); tap++) {
        int64_t y = row + g->padding - tap / g->kernel_width, x = column + g->padding - tap % g->kernel_width;
        if (y < 0 || x < 0 || y % g->stride || x % g->stride) continue;
        y /= g->stride, x /= g->stride;
        if (y >= g->out_height || x >= g->out_width) continue;
        const int32_t at = (int32_t)((y * g->out_width + x) * g->outputs);
        int k = r->taps++;
        for (; k > 0 && r->at[k - 1] / block > at / block; k--) r->tap[k] = r->tap[k - 1], r->at[k] = r->at[k - 1];
        r->tap[k] = (int32_t)tap, r->at[k] = at;
    }
}

static int same_reach(const struct reach *group, const struct reached *r) {
    if (group->taps != r->taps) return 0;
    for (int k = 0; k < r->taps; k++)
        if (group->tap[k] != r->tap[k] || group->shift[k] != r->at[k] - r->at[0]) return 0;
    return 1;
}

/* An empty group of pixels that are reached like `r`, with room for `pixels`. */
static int new_reach(struct reach *group, const struct reached *r, int64_t pixels) {
    int32_t *memory = malloc((2 * r->taps + 2 * pixels) * sizeof(int32_t));
    if (!memory) return 0;
    int32_t *places = memory + 2 * r->taps;
    *group = (struct reach){0, r->taps, memory, memory + r->taps, places, places + pixels};
    for (int k = 0; k < r->taps; k++) {
        group->tap[k] = r->tap[k];
        group->shift[k] = r->at[k] - r->at[0];
    }
    return 1;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Groups the pixels of one direction, block of samples by block. `r` has room for all taps. Returns the number of
 * groups, or −1. */
static int64_t group_pixels(const struct geometry *g, int backward, int by_rows, struct reached *r,
                            struct reach **result) {
    const int64_t block_rows = by_rows ? larger(ROW_PIXELS / g->out_width, 1) : g->out_height;
    int64_t in = g->height * g->width * g->inputs, out = g->out_height * g->out_width * g->outputs;
    int64_t rows = backward ? g->height : g->out_height, columns = backward ? g->width : g->out_width;
    int64_t width = backward ? g->inputs : g->outputs, from_size = backward ? out : in, to_size = backward ? in : out;
    int64_t block = smaller(larger(PRODUCT_BLOCK / (in + out), 1), g->samples), count = 0, room = 0;
    *result = NULL;
    for (int64_t first = 0; first < g->samples; first += block) {
        int64_t begin = count, last = smaller(first + block, g->samples);
        for (int64_t i = 0; i < (last - first) * rows * columns; i++) {
            int64_t sample = first + i / (rows * columns), row = i / columns % rows, column = i % columns;
            int64_t group = begin;
            r->taps = 0;
            if (backward) reach_of_input(g, row, column, block_rows * g->out_width * g->outputs, r);
            else reach_of_output(g, row, column, r);
            while (group < count && !same_reach(*result + group, r)) group++;
            if (group == count) {
                if (count == room) {
                    struct reach *grown = realloc(*result, (room = 2 * room + 16) * sizeof(struct reach));
                    if (!grown) return -1;
                    *result = grown;
                }
                if (!new_reach(*result + count, r, block * rows * columns)) return -1;
                count++;
            }
            struct reach *to = *result + group;
            to->from[to->pixels] = (int32_t)(sample * from_size + (r->taps ? r->at[0] : 0));
            to->to[to->pixels++] = (int32_t)(sample * to_size + (row * columns + column) * width);
        }
    }
    return count;
}

static int64_t make_reaches(const struct geometry *g, int backward, int by_rows, struct reach **result) {
    int32_t *room = malloc(2 * tap_count(g) * sizeof(int32_t));
    struct reached r = {0, room, room + tap_count(g)};
    int64_t count = room ? group_pixels(g, backward, by_rows, &r, result) : -1;
    free(room);
    return count;
}

/* The pairs of every block of output pixels and tap. Returns their number, or −1. */
static int64_t make_joints(const struct geometry *g, struct joint **result) {
    int64_t pixels = g->out_height * g->out_width, all = g->samples * pixels, taps = tap_count(g), count = 0;
    *result = calloc((all + JOINT_PIXELS - 1) / JOINT_PIXELS * taps, sizeof(struct joint));
    if (!*result) return -1;
    for (int64_t first = 0; first < all; first += JOINT_PIXELS)
        for (int64_t tap = 0; tap < taps; tap++) {
            int32_t *memory = malloc(2 * JOINT_PIXELS * sizeof(int32_t));
            if (!memory) return -1;
            struct joint *j = *result + count++;
            *j = (struct joint){(int32_t)tap, 0, memory, memory + JOINT_PIXELS};
            for (int64_t i = first; i < smaller(first + JOINT_PIXELS, all); i++) {
                int64_t y = i % pixels / g->out_width * g->stride + tap / g->kernel_width - g->padding;
                int64_t x = i % g->out_width * g->stride + tap % g->kernel_width - g->padding;
                if (y < 0 || y >= g->height || x < 0 || x >= g->width) continue;
                j->in[j->pairs] = (int32_t)(((i / pixels * g->height + y) * g->width + x) * g->inputs);
                j->out[j->pairs++] = (int32_t)(i * g->outputs);
            }
        }
    return count;
}

int make_taps(const struct geometry *g, int wanted, struct taps *t) {
    *t = (struct taps){.geometry = *g, .filtered = wanted & FILTERED && winograd_fits(g)};
    int64_t in = g->height * g->width * g->inputs, out = g->out_height * g->out_width * g->outputs;
    if (g->samples * larger(in, out) > INT32_MAX) return 0;
    if (wanted & PRODUCT && !t->filtered) t->forward_count = make_reaches(g, 0, 0, &t->forward);
    if (wanted & INPUT_GRADIENT && !t->filtered)
        t->backward_count = make_reaches(g, 1, wanted & BY_ROWS, &t->backward);
    if (wanted & WEIGHT_GRADIENT) t->joint_count = make_joints(g, &t->joints);
    return t->forward_count >= 0 && t->backward_count >= 0 && t->joint_count >= 0;
}

void free_taps(struct taps *t) {
    for (int64_t i = 0; i < t->forward_count; i++) free(t->forward[i].tap);
    for (int64_t i = 0; i < t->backward_count; i++) free(t->backward[i].tap);
    for (int64_t i = 0; i < t->joint_count; i++) free(t->joints[i].in);
    free(t->forward), free(t->backward), free(t->joints);
}

/* Sums of products */

/* Some pixels of a group, and the taps whose products are added to them. */
struct part { const struct reach *reach; int64_t pixel, first_tap, end_tap, depth, width, column; };

INLINE void reach_tile(const int rows, const int vectors, const struct part *p, const struct factors *f, REAL *result,
                       int add) {
    const struct reach *reach = p->reach;
    vector sum[ROWS][VECTORS];
    EACH(r, rows)
        EACH(v, vectors)
            sum[r][v] = add ? load(result + reach->to[p->pixel + r] + p->column + v * LANES) : (vector){0};
    for (int s = 0; s < f->sources; s++)
        for (int64_t k = p->first_tap; k < p->end_tap; k++) {
            const REAL *row[ROWS], *b = f->right[s] + reach->tap[k] * p->depth * p->width + p->column;
            EACH(r, rows) row[r] = f->left[s] + reach->from[p->pixel + r] + reach->shift[k];
            /* an operand is loaded once for all rows; a pixel's numbers are factors, broadcast one by one */
            for (int64_t i = 0; i < p->depth; i++, b += p->width) {
                vector operand[VECTORS];
                EACH(v, vectors) operand[v] = load(b + v * LANES);
                EACH(r, rows)
                    EACH(v, vectors) sum[r][v] += row[r][i] * operand[v];
            }
        }
    EACH(r, rows)
        EACH(v, vectors) store(result + reach->to[p->pixel + r] + p->column + v * LANES, sum[r][v]);
}

struct reach_job { const struct reach *reaches; int64_t depth, width; const struct factors *f; REAL *result; int add; };

static void add_reach(const void *job, int64_t unit) {
    const struct reach_job *j = job;
    const int64_t taps_at_once = larger(SUM_LENGTH / j->depth, 1);
    struct part p = {.reach = j->reaches + unit, .depth = j->depth, .width = j->width};
    while (p.column < p.width) {
        const int vectors = vectors_left(p.width - p.column);
        p.first_tap = 0;
        do {
            p.end_tap = smaller(p.first_tap + taps_at_once, p.reach->taps);
            for (p.pixel = 0; p.pixel < p.reach->pixels;) {
                const int rows = next_rows(p.reach->pixels - p.pixel);
#define TILE(R, V) reach_tile(R, V, &p, j->f, j->result, j->add || p.first_tap)
                WITH_TILE(rows, vectors, TILE)
#undef TILE
                p.pixel += rows;
            }
            p.first_tap = p.end_tap;
        } while (p.first_tap < p.reach->taps);
        p.column += vectors * LANES;
    }
}

int64_t taps_scratch(const struct taps *t) { return t->filtered ? winograd_scratch(&t->geometry) : 0; }

void tap_product(const struct taps *t, struct factors f, REAL *result, int add, REAL *scratch, int64_t threads) {
    const struct geometry *g = &t->geometry;
    const struct reach_job j = {t->forward, g->inputs, g->outputs, &f, result, add};
    if (t->filtered) winograd(g, f, g->inputs, g->outputs, 0, result, add, scratch, threads);
    else for_each_unit(t->forward_count, threads, add_reach, &j);
}

void tap_input_gradient(const struct taps *t, struct factors f, REAL *result, int add, REAL *scratch,
                        int64_t threads) {
    const struct geometry *g = &t->geometry;
    const struct reach_job j = {t->backward, g->outputs, g->inputs, &f, result, add};
    if (t->filtered) winograd(g, f, g->outputs, g->inputs, 1, result, add, scratch, threads);
    else for_each_unit(t->backward_count, threads, add_reach, &j);
}

/* Some rows of a matrix product. */
INLINE void row_tile(const int rows, const int vectors, const struct factors *f, int64_t row, int64_t column,
                     int64_t depth, int64_t width, REAL *result) {
    vector sum[ROWS][VECTORS];
    EACH(r, rows)
        EACH(v, vectors) sum[r][v] = (vector){0};
    for (int s = 0; s < f->sources; s++) {
        const REAL *a = f->left[s] + row * depth, *b = f->right[s] + column;
        for (int64_t i = 0; i < depth; i++, b += width) {
            vector operand[VECTORS];
            EACH(v, vectors) operand[v] = load(b + v * LANES);
            EACH(r, rows)
                EACH(v, vectors) sum[r][v] += a[r * depth + i] * operand[v];
        }
    }
    EACH(r, rows)
        EACH(v, vectors) store(result + (row + r) * width + column + v * LANES, sum[r][v]);
}

void multiply(int64_t rows, int64_t depth, int64_t width, struct factors f, REAL *result) {
    for (int64_t column = 0; column < width;) {
        const int vectors = vectors_left(width - column);
        for (int64_t row = 0; row < rows;) {
            const int now = next_rows(rows - row);
#define TILE(R, V) row_tile(R, V, &f, row, column, depth, width, result)
            WITH_TILE(now, vectors, TILE)
#undef TILE
            row += now;
        }
        column += vectors * LANES;
    }
}

/* Some rows and columns of the kernel gradient of a tap. */
INLINE void joint_tile(const int rows, const int vectors, const struct joint *j, const struct factors *f, int64_t row,
                       int64_t column, REAL *result, int64_t width, int add) {
    vector sum[ROWS][VECTORS];
    EACH(r, rows)
        EACH(v, vectors) sum[r][v] = add ? load(result + r * width + v * LANES) : (vector){0};
    for (int s = 0; s < f->sources; s++) {
        const REAL *a = f->left[s] + row, *b = f->right[s] + column;
        for (int32_t p = 0; p < j->pairs; p++) {
            const REAL *left = a + j->in[p], *right = b + j->out[p];
            vector operand[VECTORS];
            EACH(v, vectors) operand[v] = load(right + v * LANES);
            EACH(r, rows)
                EACH(v, vectors) sum[r][v] += left[r] * operand[v];
        }
    }
    EACH(r, rows)
        EACH(v, vectors) store(result + r * width + v * LANES, sum[r][v]);
}

struct joint_job { const struct taps *taps; const struct factors *f; REAL *result; int add; };

/* Adds one block of pixels to the kernel gradient of a tap. */
static void add_joint(const struct joint_job *job, int64_t number) {
    const struct taps *t = job->taps;
    const struct joint *j = t->joints + number;
    const int64_t height = t->geometry.inputs, width = t->geometry.outputs;
    const int add = job->add || number >= tap_count(&t->geometry);  /* not the first block */
    for (int64_t column = 0; column < width;) {
        const int vectors = vectors_left(width - column);
        for (int64_t row = 0; row < height;) {
            const int rows = next_rows(height - row);
            REAL *to = job->result + (j->tap * height + row) * width + column;
#define TILE(R, V) joint_tile(R, V, j, job->f, row, column, to, width, add)
            WITH_TILE(rows, vectors, TILE)
#undef TILE
            row += rows;
        }
        column += vectors * LANES;
    }
}

static void add_joints_of_tap(const void *job, int64_t tap) {
    const struct joint_job *j = job;
    for (int64_t i = tap; i < j->taps->joint_count; i += tap_count(&j->taps->geometry)) add_joint(j, i);
}

void tap_weight_gradient(const struct taps *t, struct factors f, REAL *result, int add, int64_t threads) {
    const struct joint_job j = {t, &f, result, add};
    if (threads > 1) for_each_unit(tap_count(&t->geometry), threads, add_joints_of_tap, &j);
    else for (int64_t i = 0; i < t->joint_count; i++) add_joint(&j, i);  /* a block of pixels stays in the cache */
}

void transpose_kernels(const struct geometry *g, const REAL *weight, REAL *transposed) {
    for (int64_t tap = 0; tap < tap_count(g); tap++) {
        int64_t place = tap * g->inputs * g->outputs;
        transpose(g->inputs, g->outputs, weight + place, transposed + place, g->inputs);
    }
}

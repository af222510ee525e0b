/* Convolution and batch norm for networks whose every task has weights of its own.
 *
 * All arrays are dense, the last index the fastest: images [task][sample][row][column][channel], kernels
 * [task][kernel row][kernel column][input channel][output channel]. Compiled once with REAL=float, once with
 * REAL=double. The work is cut into units that write to places of their own, each in a fixed order, so that the
 * number of threads changes no bit. Channels that vectors run over are multiples of LANES: the caller sees to it.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, ROWS = 6, VECTORS = 4 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, ROWS = 6, VECTORS = 2 };
#else
enum { VECTOR_BYTES = 16, ROWS = 6, VECTORS = 4 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(REAL) };
enum { LOG_LANES = LANES == 16 ? 4 : LANES == 8 ? 3 : LANES == 4 ? 2 : 1 };
enum { WIDE = 4 };

/* Pixels whose products are added up before the next block's: with their inputs and outputs they fit the cache. */
enum { BLOCK_PIXELS = 64 };

/* Rows of a long column that are summed before they join the others, which keeps the rounding small. */
enum { BLOCK_ROWS = 32 };

typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

typedef __typeof__((vector){0} > (vector){0}) mask;

#define INLINE static inline __attribute__((always_inline))

/* A loop that is unrolled whole, so that the arrays in it become registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

INLINE vector load(const REAL *p) { return *(const vector *)p; }
INLINE void store(REAL *p, vector v) { *(vector *)p = v; }

int64_t lanes(void) { return LANES; }

/* ---- threads: those of the OpenMP that torch has loaded ------------------------------------------------------- */

typedef void (*parallel_region)(void (*body)(void *), void *state, unsigned threads, unsigned flags);
static parallel_region run_in_parallel = NULL;

void use_parallel_region(parallel_region region) { run_in_parallel = region; }

typedef void (*unit_body)(const void *job, int64_t unit);
struct share { unit_body body; const void *job; int64_t units, next; };

static void work_off(void *state) {
    struct share *s = state;
    for (;;) {
        int64_t unit = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (unit >= s->units) return;
        s->body(s->job, unit);
    }
}

static void for_each_unit(int64_t units, int64_t threads, unit_body body, const void *job) {
    struct share s = {body, job, units, 0};
    if (threads > units) threads = units;
    if (threads > 1 && run_in_parallel) run_in_parallel(work_off, &s, (unsigned)threads, 0);
    else work_off(&s);
}

/* ---- convolution ---------------------------------------------------------------------------------------------- */

struct geometry { int64_t tasks, samples, height, width, inputs, out_height, out_width, outputs, kernel_height,
                  kernel_width, stride, padding; };

/* For every tap of the kernel, the pairs (input pixel, output pixel) that it joins in a group of samples, in the
 * order of the output rows; `first[tap][row]` is where a row's pairs begin. Offsets are those of a pixel's channels. */
struct pairs { int64_t group, rows, block; int32_t *in, *out, *first; };

static int64_t tap_count(const struct geometry *g) { return g->kernel_height * g->kernel_width; }

static struct pairs make_pairs(const struct geometry *g) {
    struct pairs p;
    int64_t pixels = g->out_height * g->out_width, taps = tap_count(g);
    p.group = BLOCK_PIXELS / pixels > 1 ? BLOCK_PIXELS / pixels : 1;
    if (p.group > g->samples) p.group = g->samples;
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

/* The tap's pairs whose output rows lie in [from, to). */
INLINE int32_t pairs_of(const struct pairs *p, int64_t tap, int64_t from, int64_t to, int32_t *start) {
    const int32_t *first = p->first + tap * (p->rows + 1);
    *start = first[from];
    return first[to] - first[from];
}

/* c[ci[r]] += a[ai[r]] · b for some rows r; a row of c has vectors × LANES numbers. */
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

/* c[r] += Σ over pairs p of a[ai[p]][r] · b[bi[p]] for some rows r of c. */
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

/* Calls TILE(rows, vectors) with both numbers known to the compiler. */
#define WITH_ROWS(rows, vectors, TILE)                                                                              \
    switch (rows) {                                                                                                 \
        case 1: TILE(1, vectors); break;                                                                            \
        case 2: TILE(2, vectors); break;                                                                            \
        case 3: TILE(3, vectors); break;                                                                            \
        case 4: TILE(4, vectors); break;                                                                            \
        case 5: TILE(5, vectors); break;                                                                            \
        default: TILE(6, vectors);                                                                                  \
    }
#define WITH_TILE(rows, vectors, TILE)                                                                              \
    if (vectors == VECTORS) { WITH_ROWS(rows, VECTORS, TILE) }                                                      \
    else if (vectors == 2) { WITH_ROWS(rows, 2, TILE) }                                                             \
    else { WITH_ROWS(rows, 1, TILE) }

/* The next block of columns: VECTORS of them, or 2, or 1. */
INLINE int vectors_left(int64_t columns) {
    return columns >= VECTORS * LANES ? VECTORS : columns >= 2 * LANES ? 2 : 1;
}

/* As many tiles as needed, of nearly the same number of rows. */
INLINE int next_rows(int64_t left) {
    int64_t tiles = (left + ROWS - 1) / ROWS;
    return (int)((left + tiles - 1) / tiles);
}

/* c[ci] += a[ai] · b over a list of pairs; a's rows have `depth` numbers, c's `width`. */
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

/* The group of samples that a unit stands for: its first sample, and how many output rows it has. */
INLINE int64_t group_of(const struct convolution *c, int64_t unit, int64_t *sample) {
    *sample = unit / c->groups * c->g->samples + unit % c->groups * c->pairs.group;
    int64_t left = c->g->samples - unit % c->groups * c->pairs.group;
    return (left < c->pairs.group ? left : c->pairs.group) * c->g->out_height;
}

static void product_unit(const void *job, int64_t unit) {
    const struct convolution *c = job;
    const struct geometry *g = c->g;
    int64_t sample, rows = group_of(c, unit, &sample), taps = tap_count(g);
    const REAL *x = c->x + sample * g->height * g->width * g->inputs;
    const REAL *weight = c->weight + unit / c->groups * c->weight_step;
    REAL *y = c->result + sample * g->out_height * g->out_width * g->outputs;
    memset(y, 0, rows * g->out_width * g->outputs * sizeof(REAL));
    for (int64_t from = 0; from < rows; from += c->pairs.block) {
        int64_t to = from + c->pairs.block < rows ? from + c->pairs.block : rows;
        for (int64_t tap = 0; tap < taps; tap++) {
            int32_t start, count = pairs_of(&c->pairs, tap, from, to, &start);
            add_rows(count, g->inputs, g->outputs, x, c->pairs.in + start, y, c->pairs.out + start,
                     weight + tap * g->inputs * g->outputs);
        }
    }
}

static void input_gradient_unit(const void *job, int64_t unit) {
    const struct convolution *c = job;
    const struct geometry *g = c->g;
    int64_t sample, rows = group_of(c, unit, &sample), taps = tap_count(g);
    const REAL *gy = c->gy + sample * g->out_height * g->out_width * g->outputs;
    const REAL *transposed = c->weight + unit / c->groups * c->weight_step;
    REAL *gx = c->result + sample * g->height * g->width * g->inputs;
    memset(gx, 0, rows / g->out_height * g->height * g->width * g->inputs * sizeof(REAL));
    for (int64_t from = 0; from < rows; from += c->pairs.block) {
        int64_t to = from + c->pairs.block < rows ? from + c->pairs.block : rows;
        for (int64_t tap = 0; tap < taps; tap++) {
            int32_t start, count = pairs_of(&c->pairs, tap, from, to, &start);
            add_rows(count, g->outputs, g->inputs, gy, c->pairs.out + start, gx, c->pairs.in + start,
                     transposed + tap * g->inputs * g->outputs);
        }
    }
}

/* All taps of a task, or one of them where there are more threads than tasks. */
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

/* y = x ∗ w; weight_step is 0 where all tasks share one kernel. */
void product(const struct geometry *g, const REAL *x, const REAL *weight, int64_t weight_step, REAL *y,
             int64_t threads) {
    convolve((struct convolution){.g = g, .weight_step = weight_step, .x = x, .weight = weight, .result = y}, 0,
             threads, product_unit);
}

struct transposition { int64_t inputs, outputs; const REAL *from; REAL *to; };

/* Transposes LANES × LANES numbers by exchanging ever smaller squares. */
INLINE void transpose_square(const REAL *from, int64_t from_width, REAL *to, int64_t to_width) {
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
}

static void transpose_unit(const void *job, int64_t unit) {
    const struct transposition *t = job;
    const REAL *from = t->from + unit * t->inputs * t->outputs;
    REAL *to = t->to + unit * t->inputs * t->outputs;
    for (int64_t o = 0; o < t->outputs; o += LANES)
        for (int64_t i = 0; i < t->inputs; i += LANES)
            transpose_square(from + i * t->outputs + o, t->outputs, to + o * t->inputs + i, t->inputs);
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

/* ---- batch norm with a leaky ReLU behind it ------------------------------------------------------------------- */

/* x [task][rows][channels]. With x̂ = (x − mean) · rstd and z = γ x̂ + β, y = z where z > 0, else slope · z: slope 0
 * is the ReLU, slope 1 none at all. Statistics are [task][channels]; γ and β step from task to task by scale_step,
 * which is 0 where all tasks share them. Below, Σ and a bar are a sum and a mean over the rows. */
struct norm {
    int64_t tasks, rows, channels, scale_step;
    REAL epsilon, slope;
    const REAL *x, *scale, *shift, *gy, *v, *v_scale, *v_shift, *scale_gradient, *shift_gradient;
    REAL *mean, *rstd, *y, *gx, *g_scale, *g_shift, *ggy, *hx, *h_scale;
};

/* 1 where z > 0, else slope. */
INLINE vector steepness(vector z, REAL slope) {
    mask above = z > 0;
    return (vector)(((mask)((vector){0} + 1) & above) | ((mask)((vector){0} + slope) & ~above));
}

INLINE vector reciprocal_root(vector x) {
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = 1 / (sizeof(REAL) == 4 ? __builtin_sqrtf(x[lane]) : __builtin_sqrt(x[lane]));
    return x;
}

/* The columns of a unit: some vectors' width, of one task. */
struct columns { int64_t at, stat, scale; vector mean[WIDE], rstd[WIDE], slant[WIDE], shift[WIDE]; };

INLINE void find_columns(const struct norm *n, int64_t task, int64_t column, struct columns *c) {
    c->at = task * n->rows * n->channels + column;
    c->stat = task * n->channels + column;
    c->scale = task * n->scale_step + column;
}

INLINE void load_columns(const struct norm *n, const int wide, struct columns *c) {
    EACH(v, wide) {
        c->mean[v] = load(n->mean + c->stat + v * LANES);
        c->rstd[v] = load(n->rstd + c->stat + v * LANES);
        c->slant[v] = load(n->scale + c->scale + v * LANES) * c->rstd[v];
        c->shift[v] = load(n->shift + c->scale + v * LANES);
    }
}

INLINE int64_t block_end(int64_t from, int64_t rows) { return from + BLOCK_ROWS < rows ? from + BLOCK_ROWS : rows; }

/* Mean and variance block by block (Chan, Golub and LeVeque 1979, equations 2.1). */
INLINE void norm_columns(const struct norm *n, const int wide, struct columns *c) {
    const REAL *x = n->x + c->at;
    vector mean[WIDE] = {{0}}, spread[WIDE] = {{0}};
    for (int64_t from = 0; from < n->rows; from = block_end(from, n->rows)) {
        int64_t to = block_end(from, n->rows);
        vector sum[WIDE] = {{0}}, squares[WIDE] = {{0}};
        for (int64_t row = from; row < to; row++)
            EACH(v, wide) sum[v] += load(x + row * n->channels + v * LANES);
        EACH(v, wide) sum[v] /= (REAL)(to - from);
        for (int64_t row = from; row < to; row++)
            EACH(v, wide) {
                vector d = load(x + row * n->channels + v * LANES) - sum[v];
                squares[v] += d * d;
            }
        REAL weight = (REAL)(to - from) / (REAL)to;
        EACH(v, wide) {
            vector gap = sum[v] - mean[v];
            spread[v] += squares[v] + gap * gap * (weight * (REAL)from);
            mean[v] += gap * weight;
        }
    }
    EACH(v, wide) {
        store(n->mean + c->stat + v * LANES, mean[v]);
        store(n->rstd + c->stat + v * LANES, reciprocal_root(spread[v] / (REAL)n->rows + n->epsilon));
    }
    load_columns(n, wide, c);
    for (int64_t row = 0; row < n->rows; row++)
        EACH(v, wide) {
            int64_t i = row * n->channels + v * LANES;
            vector z = (load(x + i) - c->mean[v]) * c->slant[v] + c->shift[v];
            store(n->y + c->at + i, z * steepness(z, n->slope));
        }
}

/* gx = γ rstd (g − ḡ − x̂ · mean(g x̂)) with g = gy · y′(z); the gradient of γ is Σ g x̂, that of β is Σ g. */
INLINE void norm_backward_columns(const struct norm *n, const int wide, struct columns *c) {
    const REAL *x = n->x + c->at, *gy = n->gy + c->at;
    vector total[WIDE] = {{0}}, total_d[WIDE] = {{0}}, along[WIDE];
    load_columns(n, wide, c);
    for (int64_t from = 0; from < n->rows; from = block_end(from, n->rows)) {
        vector sum[WIDE] = {{0}}, sum_d[WIDE] = {{0}};
        for (int64_t row = from; row < block_end(from, n->rows); row++)
            EACH(v, wide) {
                int64_t i = row * n->channels + v * LANES;
                vector d = load(x + i) - c->mean[v];
                vector g = load(gy + i) * steepness(d * c->slant[v] + c->shift[v], n->slope);
                sum[v] += g;
                sum_d[v] += g * d;
            }
        EACH(v, wide) {
            total[v] += sum[v];
            total_d[v] += sum_d[v];
        }
    }
    EACH(v, wide) {
        vector g_scale = total_d[v] * c->rstd[v];
        store(n->g_scale + c->stat + v * LANES, g_scale);
        store(n->g_shift + c->stat + v * LANES, total[v]);
        total[v] /= (REAL)n->rows;
        along[v] = g_scale / (REAL)n->rows * c->rstd[v];
    }
    for (int64_t row = 0; row < n->rows; row++)
        EACH(v, wide) {
            int64_t i = row * n->channels + v * LANES;
            vector d = load(x + i) - c->mean[v];
            vector g = load(gy + i) * steepness(d * c->slant[v] + c->shift[v], n->slope);
            store(n->gx + c->at + i, c->slant[v] * (g - total[v] - d * along[v]));
        }
}

/* The backward pass of norm_backward: from the cotangents v of gx, v_scale of γ's gradient and v_shift of β's to those
 * of gy, x and γ. With S = mean(g x̂), u = mean(v x̂), C = mean(v g) − v̄ ḡ − u S and
 * q = (v_scale − γ rstd u) g − γ rstd S v: ggy = y′(z) (γ rstd (v − v̄ − x̂ u) + v_scale x̂ + v_shift),
 * h_scale = rows · rstd · C, hx = rstd (q − q̄ − x̂ mean(q x̂)) − γ rstd² C x̂. */
INLINE void norm_second_columns(const struct norm *n, const int wide, struct columns *c) {
    const REAL *x = n->x + c->at, *gy = n->gy + c->at, *v_x = n->v + c->at;
    const REAL rows = (REAL)n->rows;
    vector total[WIDE] = {{0}}, total_d[WIDE] = {{0}}, total_g[WIDE] = {{0}};
    vector g_d[WIDE], g_1[WIDE], h_g[WIDE], h_v[WIDE], h_d[WIDE], h_1[WIDE];
    load_columns(n, wide, c);
    for (int64_t from = 0; from < n->rows; from = block_end(from, n->rows)) {
        vector sum[WIDE] = {{0}}, sum_d[WIDE] = {{0}}, sum_g[WIDE] = {{0}};
        for (int64_t row = from; row < block_end(from, n->rows); row++)
            EACH(v, wide) {
                int64_t i = row * n->channels + v * LANES;
                vector d = load(x + i) - c->mean[v], w = load(v_x + i);
                sum[v] += w;
                sum_d[v] += w * d;
                sum_g[v] += w * load(gy + i) * steepness(d * c->slant[v] + c->shift[v], n->slope);
            }
        EACH(v, wide) {
            total[v] += sum[v];
            total_d[v] += sum_d[v];
            total_g[v] += sum_g[v];
        }
    }
    EACH(v, wide) {
        int64_t stat = c->stat + v * LANES;
        vector slant = c->slant[v], rstd = c->rstd[v];
        vector S = load(n->scale_gradient + stat) / rows, g_mean = load(n->shift_gradient + stat) / rows;
        vector v_mean = total[v] / rows, u = total_d[v] * rstd / rows;
        vector C = total_g[v] / rows - v_mean * g_mean - u * S;
        vector by_g = load(n->v_scale + stat) - slant * u, by_v = slant * S;
        vector q_mean = by_g * g_mean - by_v * v_mean, q_along = by_g * S - by_v * u;
        store(n->h_scale + stat, C * rstd * rows);
        g_d[v] = by_g * rstd;
        g_1[v] = load(n->v_shift + stat) - slant * v_mean;
        h_g[v] = rstd * by_g;
        h_v[v] = rstd * by_v;
        h_d[v] = rstd * rstd * (q_along + slant * C);
        h_1[v] = rstd * q_mean;
    }
    for (int64_t row = 0; row < n->rows; row++)
        EACH(v, wide) {
            int64_t i = row * n->channels + v * LANES;
            vector d = load(x + i) - c->mean[v], w = load(v_x + i);
            vector steep = steepness(d * c->slant[v] + c->shift[v], n->slope), g = load(gy + i) * steep;
            store(n->ggy + c->at + i, steep * (c->slant[v] * w + g_d[v] * d + g_1[v]));
            store(n->hx + c->at + i, h_g[v] * g - h_v[v] * w - h_d[v] * d - h_1[v]);
        }
}

/* One function of a whole norm from that of some columns: WIDE vectors together, and singly those left over. */
#define DEFINE_NORM(NAME)                                                                                           \
    static void NAME##_unit(const void *job, int64_t unit) {                                                        \
        const struct norm *n = job;                                                                                 \
        struct columns c;                                                                                           \
        int64_t units = (n->channels + WIDE * LANES - 1) / (WIDE * LANES), column = unit % units * WIDE * LANES;    \
        if (column + WIDE * LANES <= n->channels) {                                                                 \
            find_columns(n, unit / units, column, &c);                                                              \
            NAME##_columns(n, WIDE, &c);                                                                            \
        } else                                                                                                      \
            for (; column < n->channels; column += LANES) {                                                         \
                find_columns(n, unit / units, column, &c);                                                          \
                NAME##_columns(n, 1, &c);                                                                           \
            }                                                                                                       \
    }                                                                                                               \
    void NAME(const struct norm *n, int64_t threads) {                                                              \
        for_each_unit(n->tasks * ((n->channels + WIDE * LANES - 1) / (WIDE * LANES)), threads, NAME##_unit, n);     \
    }

DEFINE_NORM(norm)
DEFINE_NORM(norm_backward)
DEFINE_NORM(norm_second)

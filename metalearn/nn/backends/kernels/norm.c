/* Batch norm with a leaky ReLU behind it, and its first and second derivatives. Statistics are those of all rows of a
 * task, or of its first rows. */

#include "norm.h"

/* Rows of a block. Long columns are summed block by block, which keeps the rounding small. */
enum { BLOCK_ROWS = 32 };

/* Vectors of a row that are computed together: neighbours in memory are read at once. */
enum { WIDE = 4 };

/* 1 where z > 0, else slope; by masks, since C has no ?: for vectors. */
INLINE vector steepness(vector z, REAL slope) {
    mask above = z > 0;
    return (vector)(((mask)((vector){0} + 1) & above) | ((mask)((vector){0} + slope) & ~above));
}

/* Lane by lane, since vectors have no root in C. There is one for every channel only. */
INLINE vector reciprocal_root(vector x) {
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = 1 / (sizeof(REAL) == 4 ? __builtin_sqrtf(x[lane]) : __builtin_sqrt(x[lane]));
    return x;
}

/* The columns of a unit: a few vectors of one task. */
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

/* The end of the block of rows that begins at `from`. No block holds both measured and other rows. */
INLINE int64_t block_end(const struct norm *n, int64_t from) {
    int64_t end = from < n->measured ? n->measured : n->rows;
    return from + BLOCK_ROWS < end ? from + BLOCK_ROWS : end;
}

/* Some rows and columns of x: where the first row begins, and the distance to the next one. */
struct rows { const REAL *first; int64_t step; };

/* sum += a few rows of windows, times the kernels' columns. */
INLINE void window_tile(const int count, const int wide, const struct norm *n, int64_t row, int64_t column, REAL *to) {
    vector sum[BLOCK_ROWS / 8][WIDE] = {{{0}}};
    for (int64_t k = 0; k < n->depth; k++)
        EACH(v, wide) {
            vector kernel = load(n->kernels + k * n->channels + column + v * LANES);
            EACH(r, count) sum[r][v] += n->windows[(row + r) * n->depth + k] * kernel;
        }
    EACH(r, count)
        EACH(v, wide) store(to + (r * WIDE + v) * LANES, sum[r][v]);
}

/* The rows from `from` to `to` of a unit's columns; if they are not stored, they are computed in `block`. */
INLINE struct rows rows_of(const struct norm *n, const int wide, const struct columns *c, int64_t from, int64_t to,
                           REAL *block) {
    if (!n->windows) return (struct rows){n->x + c->at + from * n->channels, n->channels};
    int64_t row = from;
    for (; row + 4 <= to; row += 4) window_tile(4, wide, n, row, c->at, block + (row - from) * WIDE * LANES);
    for (; row < to; row++) window_tile(1, wide, n, row, c->at, block + (row - from) * WIDE * LANES);
    return (struct rows){block, WIDE * LANES};
}

/* g_kernels += the products of windows and some rows of x's gradient. */
INLINE void add_kernel_gradient(const struct norm *n, const int wide, const struct columns *c, int64_t from, int64_t to,
                                const REAL *gx) {
    for (int64_t k = 0; k < n->depth; k++) {
        REAL *g = n->g_kernels + k * n->channels + c->at;
        vector sum[WIDE];
        EACH(v, wide) sum[v] = load(g + v * LANES);
        for (int64_t row = from; row < to; row++)
            EACH(v, wide) sum[v] += n->windows[row * n->depth + k] * load(gx + ((row - from) * WIDE + v) * LANES);
        EACH(v, wide) store(g + v * LANES, sum[v]);
    }
}

/* Mean and variance block by block (Chan, Golub and LeVeque 1979, equations 2.1). */
INLINE void norm_columns(const struct norm *n, const int wide, struct columns *c) {
    REAL block[BLOCK_ROWS * WIDE * LANES];
    vector mean[WIDE] = {{0}}, spread[WIDE] = {{0}};
    for (int64_t from = 0, to; from < n->measured; from = to) {
        to = block_end(n, from);
        const struct rows x = rows_of(n, wide, c, from, to, block);
        vector sum[WIDE] = {{0}}, squares[WIDE] = {{0}};
        for (int64_t row = 0; row < to - from; row++)
            EACH(v, wide) sum[v] += load(x.first + row * x.step + v * LANES);
        EACH(v, wide) sum[v] /= (REAL)(to - from);
        for (int64_t row = 0; row < to - from; row++)
            EACH(v, wide) {
                vector d = load(x.first + row * x.step + v * LANES) - sum[v];
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
        store(n->rstd + c->stat + v * LANES, reciprocal_root(spread[v] / (REAL)n->measured + n->epsilon));
    }
    load_columns(n, wide, c);
    for (int64_t from = 0, to; from < n->rows; from = to) {
        to = block_end(n, from);
        const struct rows x = rows_of(n, wide, c, from, to, block);
        REAL *y = n->y + c->at + from * n->channels;
        for (int64_t row = 0; row < to - from; row++)
            EACH(v, wide) {
                vector z = (load(x.first + row * x.step + v * LANES) - c->mean[v]) * c->slant[v] + c->shift[v];
                store(y + row * n->channels + v * LANES, z * steepness(z, n->slope));
            }
    }
}

/* gx = γ rstd (g − {Σ g / m} − {x̂ Σ g x̂ / m}) with g = gy · y′(z); the gradient of γ is Σ g x̂, that of β is Σ g. */
INLINE void norm_backward_columns(const struct norm *n, const int wide, struct columns *c) {
    REAL block[BLOCK_ROWS * WIDE * LANES];
    vector total[WIDE] = {{0}}, total_d[WIDE] = {{0}}, along[WIDE];
    load_columns(n, wide, c);
    for (int64_t from = 0, to; from < n->rows; from = to) {
        to = block_end(n, from);
        const struct rows x = rows_of(n, wide, c, from, to, block);
        const REAL *gy = n->gy + c->at + from * n->channels;
        vector sum[WIDE] = {{0}}, sum_d[WIDE] = {{0}};
        for (int64_t row = 0; row < to - from; row++)
            EACH(v, wide) {
                vector d = load(x.first + row * x.step + v * LANES) - c->mean[v];
                vector g = load(gy + row * n->channels + v * LANES);
                g *= steepness(d * c->slant[v] + c->shift[v], n->slope);
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
        total[v] /= (REAL)n->measured;
        along[v] = g_scale / (REAL)n->measured * c->rstd[v];
    }
    for (int64_t from = 0, to; from < n->rows; from = to) {
        to = block_end(n, from);
        const struct rows x = rows_of(n, wide, c, from, to, block);
        const REAL *gy = n->gy + c->at + from * n->channels;
        REAL *gx = n->windows ? block : n->gx + c->at + from * n->channels;
        for (int64_t row = 0; row < to - from; row++)
            EACH(v, wide) {
                vector d = load(x.first + row * x.step + v * LANES) - c->mean[v];
                vector g = load(gy + row * n->channels + v * LANES);
                g *= steepness(d * c->slant[v] + c->shift[v], n->slope);
                if (from < n->measured) g = g - total[v] - d * along[v];
                store(gx + row * x.step + v * LANES, c->slant[v] * g);
            }
        if (n->windows) add_kernel_gradient(n, wide, c, from, to, block);
    }
}

/* The backward pass of norm_backward. It takes the cotangents v of gx, v_scale of the gradient of γ and v_shift of that
 * of β, and gives the cotangents of gy, x and γ. With G = Σ g / m, S = Σ g x̂ / m, V = Σ′ v / m, U = Σ′ v x̂ / m,
 * C = Σ v g / m − V G − U S and q = (v_scale − γ rstd U) g − {γ rstd S v}:
 * ggy = y′(z) (γ rstd (v − V − x̂ U) + v_scale x̂ + v_shift), h_scale = m · rstd · C,
 * hx = rstd (q − {Σ q / m} − {x̂ Σ q x̂ / m}) − {γ rstd² C x̂}. */
INLINE void norm_second_columns(const struct norm *n, const int wide, struct columns *c) {
    const REAL *x = n->x + c->at, *gy = n->gy + c->at, *v_x = n->v + c->at;
    const REAL m = (REAL)n->measured;
    vector total[WIDE] = {{0}}, total_d[WIDE] = {{0}}, total_g[WIDE] = {{0}};
    vector g_d[WIDE], g_1[WIDE], h_g[WIDE], h_v[WIDE], h_d[WIDE], h_1[WIDE];
    load_columns(n, wide, c);
    for (int64_t from = 0, to; from < n->rows; from = to) {
        to = block_end(n, from);
        vector sum[WIDE] = {{0}}, sum_d[WIDE] = {{0}}, sum_g[WIDE] = {{0}};
        for (int64_t row = from; row < to; row++)
            EACH(v, wide) {
                int64_t i = row * n->channels + v * LANES;
                vector d = load(x + i) - c->mean[v], w = load(v_x + i);
                sum[v] += w;
                sum_d[v] += w * d;
                sum_g[v] += w * load(gy + i) * steepness(d * c->slant[v] + c->shift[v], n->slope);
            }
        EACH(v, wide) {
            if (from < n->measured) {
                total[v] += sum[v];
                total_d[v] += sum_d[v];
            }
            total_g[v] += sum_g[v];
        }
    }
    EACH(v, wide) {
        int64_t stat = c->stat + v * LANES;
        vector slant = c->slant[v], rstd = c->rstd[v];
        vector S = load(n->scale_gradient + stat) / m, G = load(n->shift_gradient + stat) / m;
        vector V = total[v] / m, U = total_d[v] * rstd / m, C = total_g[v] / m - V * G - U * S;
        vector by_g = load(n->v_scale + stat) - slant * U, by_v = slant * S;
        store(n->h_scale + stat, C * rstd * m);
        g_d[v] = by_g * rstd;
        g_1[v] = load(n->v_shift + stat) - slant * V;
        h_g[v] = rstd * by_g;
        h_v[v] = rstd * by_v;
        h_d[v] = rstd * rstd * (by_g * S - by_v * U + slant * C);
        h_1[v] = rstd * (by_g * G - by_v * V);
    }
#define STORE_ROWS(FROM, TO, HX)                                                                                    \
    for (int64_t row = FROM; row < TO; row++)                                                                       \
        EACH(v, wide) {                                                                                             \
            int64_t i = row * n->channels + v * LANES;                                                              \
            vector d = load(x + i) - c->mean[v], w = load(v_x + i);                                                 \
            vector steep = steepness(d * c->slant[v] + c->shift[v], n->slope), g = load(gy + i) * steep;            \
            store(n->ggy + c->at + i, steep * (c->slant[v] * w + g_d[v] * d + g_1[v]));                             \
            store(n->hx + c->at + i, HX);                                                                           \
        }
    STORE_ROWS(0, n->measured, h_g[v] * g - h_v[v] * w - h_d[v] * d - h_1[v])
    STORE_ROWS(n->measured, n->rows, h_g[v] * g)
#undef STORE_ROWS
}

/* A norm, and the width of its units in vectors: WIDE, or less if there would be fewer units than threads. */
struct job { const struct norm *norm; int wide; };

static int64_t units_of(const struct job *j) {
    int64_t width = j->wide * LANES;
    return j->norm->tasks * ((j->norm->channels + width - 1) / width);
}

static struct job divided(const struct norm *n, int64_t threads) {
    struct job j = {n, WIDE};
    while (j.wide > 1 && units_of(&j) < threads) j.wide /= 2;
    return j;
}

/* Defines a function of a whole norm by that of some columns. The vectors of a full unit are computed together; those
 * of other units, one by one. */
#define DEFINE_NORM(NAME)                                                                                           \
    static void NAME##_unit(const void *job, int64_t unit) {                                                        \
        const struct job *j = job;                                                                                  \
        const struct norm *n = j->norm;                                                                             \
        struct columns c;                                                                                           \
        int64_t width = j->wide * LANES, units = units_of(j) / n->tasks, column = unit % units * width;             \
        int64_t end = column + width < n->channels ? column + width : n->channels;                                  \
        if (j->wide == WIDE && column + width <= n->channels) {                                                     \
            find_columns(n, unit / units, column, &c);                                                              \
            NAME##_columns(n, WIDE, &c);                                                                            \
        } else                                                                                                      \
            for (; column < end; column += LANES) {                                                                 \
                find_columns(n, unit / units, column, &c);                                                          \
                NAME##_columns(n, 1, &c);                                                                           \
            }                                                                                                       \
    }                                                                                                               \
    void NAME(const struct norm *n, int64_t threads) {                                                              \
        const struct job j = divided(n, threads);                                                                   \
        for_each_unit(units_of(&j), threads, NAME##_unit, &j);                                                      \
    }

DEFINE_NORM(norm)
DEFINE_NORM(norm_backward)
DEFINE_NORM(norm_second)

/* Scaled dot-product attention, its first and its second derivatives. No weights of whole heads are kept: each function
 * computes them again, some rows at a time. A unit is one head.
 *
 * With S = scale · q kᵀ + mask and the weights P = softmax(S) by rows: o = P v. With the gradient u of o, X = u vᵀ less
 * its mean under P by row, and D = scale · P ∘ X: gq = D k, gk = Dᵀ q, gv = Pᵀ u. With the cotangents a, b, c of gq, gk,
 * gv, and T = scale · (a kᵀ + q bᵀ) less its mean under P by row: the derivative of ⟨a, gq⟩ + ⟨b, gk⟩ + ⟨c, gv⟩ by X is
 * P ∘ T, and that by S is P ∘ Y, where Y = T ∘ X + u cᵀ less its mean under P by row. */

#include <math.h>
#include <stdlib.h>

#include "kernels.h"

/* Widths are multiples of LANES. A mask is added to S; head h of the heads has mask (h / mask_every) % masks, and
 * mask_step is the distance of its rows, 0 for one row. */
struct attention {
    int64_t heads, queries, keys, width, values, masks, mask_every, mask_step;
    double scale;
    const REAL *q, *k, *v, *mask, *u, *a, *b, *c;
    REAL *o, *gq, *gk, *gv, *gu;
};

/* Numbers of the four blocks of weights that a thread works on; they stay in its cache. */
enum { BLOCK_NUMBERS = 1 << 15 };

/* C[i][j] = (or += if `add`) Σ_d A[i][d] · B[d][j]. A's numbers are `row` and `step` apart, the rows of B and C `wide`
 * and `to_row`. `columns` is a multiple of LANES. */
INLINE void product_tile(const int rows, const int vectors, int64_t depth, const REAL *a, int64_t row, int64_t step,
                         const REAL *b, int64_t wide, REAL *c, int64_t to_row, const int add) {
    vector sum[ROWS][VECTORS];
    EACH(r, rows) EACH(v, vectors) sum[r][v] = add ? load(c + r * to_row + v * LANES) : (vector){0};
    for (int64_t d = 0; d < depth; d++) {
        vector operand[VECTORS];
        EACH(v, vectors) operand[v] = load(b + d * wide + v * LANES);
        EACH(r, rows) {
            REAL factor = a[r * row + d * step];
            EACH(v, vectors) sum[r][v] += factor * operand[v];
        }
    }
    EACH(r, rows) EACH(v, vectors) store(c + r * to_row + v * LANES, sum[r][v]);
}

INLINE void product_of(int64_t rows, int64_t columns, int64_t depth, const REAL *a, int64_t row, int64_t step,
                       const REAL *b, int64_t wide, REAL *c, int64_t to_row, const int add) {
    for (int64_t j = 0; j < columns;) {
        int vectors = vectors_left(columns - j);
        for (int64_t i = 0; i < rows;) {
            int count = next_rows(rows - i);
#define TILE(rows, vectors) \
    product_tile(rows, vectors, depth, a + i * row, row, step, b + j, wide, c + i * to_row + j, to_row, add)
            WITH_TILE(count, vectors, TILE)
#undef TILE
            i += count;
        }
        j += vectors * LANES;
    }
}

static void times(int64_t rows, int64_t columns, int64_t depth, const REAL *a, int64_t row, int64_t step,
                  const REAL *b, int64_t wide, REAL *c, int64_t to_row) {
    product_of(rows, columns, depth, a, row, step, b, wide, c, to_row, 0);
}

static void add_times(int64_t rows, int64_t columns, int64_t depth, const REAL *a, int64_t row, int64_t step,
                      const REAL *b, int64_t wide, REAL *c, int64_t to_row) {
    product_of(rows, columns, depth, a, row, step, b, wide, c, to_row, 1);
}

/* eˣ for x ≤ 0: 2ⁿ · eʳ with |r| ≤ ln 2 / 2, by the terms of the series that the type can show. What is not a number
 * stays so. */
INLINE vector exponential(vector x) {
    const int single = sizeof(REAL) == 4;
    const REAL least = single ? -87 : -708, shift = single ? 12582912.0f : 6755399441055744.0;
    const vector given = x;
    mask gone = x < least, unknown = x != x;
    x = (vector)(((mask)((vector){0} + least) & gone) | ((mask)x & ~gone));
    vector n = x * (REAL)1.44269504088896340736 + shift;
    mask power = (mask)n << (single ? 23 : 52);
    n -= shift;
    vector r = single ? x - n * (REAL)0.693359375 + n * (REAL)2.12194440e-4
                      : x - n * (REAL)6.93147180369123816490e-01 - n * (REAL)1.90821492927058770002e-10;
    vector sum = (vector){0} + 1;
#pragma GCC unroll 16
    for (int term = single ? 7 : 13; term; term--) sum = sum * r * ((REAL)1 / term) + 1;
    return (vector)((((mask)sum + power) & ~gone & ~unknown) | ((mask)given & unknown));
}

INLINE REAL sum_of(vector x) {
    REAL sum = 0;
    EACH(lane, LANES) sum += x[lane];
    return sum;
}

INLINE vector larger(vector x, vector y) {
    mask first = x > y;
    return (vector)(((mask)x & first) | ((mask)y & ~first));
}

/* P from S, in place; what lies behind the keys becomes 0. A row that the mask hides whole has no weights. */
static void softmax_row(const struct attention *t, const REAL *mask_row, int64_t wide, REAL *s) {
    const REAL scale = (REAL)t->scale;
    if (mask_row)
        for (int64_t j = 0; j < t->keys; j++) s[j] += mask_row[j] / scale;
    for (int64_t j = t->keys; j < wide; j++) s[j] = -INFINITY;
    vector mosts = load(s), total = {0};
    for (int64_t j = LANES; j < wide; j += LANES) mosts = larger(mosts, load(s + j));
    REAL most = mosts[0];
    EACH(lane, LANES) most = mosts[lane] > most ? mosts[lane] : most;
    if (most == -INFINITY) {
        for (int64_t j = 0; j < wide; j++) s[j] = s[j] == -INFINITY ? 0 : s[j];
        return;
    }
    for (int64_t j = 0; j < wide; j += LANES) {
        vector e = exponential((load(s + j) - most) * scale);
        store(s + j, e);
        total += e;
    }
    const REAL share = 1 / sum_of(total);
    for (int64_t j = 0; j < wide; j += LANES) store(s + j, load(s + j) * share);
}

/* x less its mean under the weights p. */
static void centre_row(int64_t wide, const REAL *p, REAL *x) {
    vector total = {0};
    for (int64_t j = 0; j < wide; j += LANES) total += load(p + j) * load(x + j);
    REAL mean = sum_of(total);
    for (int64_t j = 0; j < wide; j += LANES) store(x + j, load(x + j) - mean);
}

static void weigh_row(int64_t wide, const REAL *p, REAL scale, REAL *x) {
    for (int64_t j = 0; j < wide; j += LANES) store(x + j, load(p + j) * load(x + j) * scale);
}

/* A head, and room for it. */
struct head {
    int64_t number, wide, rows;                 /* wide: the keys, padded to whole vectors; rows of a block */
    REAL *p, *x, *t, *y;                        /* blocks */
    REAL *k, *v, *b, *c;                        /* transposed: [width][wide] */
    const REAL *from_q, *from_k, *from_v;
};

static REAL *transposed(int64_t keys, int64_t width, int64_t wide, const REAL *from, REAL *to) {
    for (int64_t d = 0; d < width; d++)
        for (int64_t j = 0; j < wide; j++) to[d * wide + j] = j < keys ? from[j * width + d] : 0;
    return to + width * wide;
}

/* The head's room, or NULL where there is no memory. */
static REAL *open_head(const struct attention *t, int64_t unit, struct head *h) {
    h->number = unit;
    h->wide = (t->keys + LANES - 1) / LANES * LANES;
    if (h->wide % 256 == 0) h->wide += LANES;  /* else the rows of a column would share the same places of the cache */
    h->rows = BLOCK_NUMBERS / h->wide / ROWS * ROWS;
    if (h->rows < ROWS) h->rows = ROWS;
    if (h->rows > t->queries) h->rows = t->queries;
    int64_t block = h->rows * h->wide;
    REAL *room = aligned_alloc(64, ((4 * block + 2 * (t->width + t->values) * h->wide) * sizeof(REAL) + 63) / 64 * 64);
    if (!room) return NULL;
    h->p = room, h->x = room + block, h->t = room + 2 * block, h->y = room + 3 * block, h->k = room + 4 * block;
    h->from_q = t->q + unit * t->queries * t->width;
    h->from_k = t->k + unit * t->keys * t->width;
    h->from_v = t->v + unit * t->keys * t->values;
    h->v = transposed(t->keys, t->width, h->wide, h->from_k, h->k);
    h->b = transposed(t->keys, t->values, h->wide, h->from_v, h->v);
    if (t->b) {
        h->c = transposed(t->keys, t->width, h->wide, t->b + unit * t->keys * t->width, h->b);
        transposed(t->keys, t->values, h->wide, t->c + unit * t->keys * t->values, h->c);
    }
    return room;
}

/* P of the queries from `first` on. */
static void weights_of(const struct attention *t, const struct head *h, int64_t first, int64_t rows) {
    times(rows, h->wide, t->width, h->from_q + first * t->width, t->width, 1, h->k, h->wide, h->p, h->wide);
    const REAL *hides = t->mask ? t->mask + h->number / t->mask_every % t->masks *
                                                (t->mask_step ? t->queries * t->mask_step : t->keys) : NULL;
    for (int64_t r = 0; r < rows; r++)
        softmax_row(t, hides ? hides + (first + r) * t->mask_step : NULL, h->wide, h->p + r * h->wide);
}

#define EACH_BLOCK(first, rows)                                                    \
    for (int64_t first = 0, rows; first < t->queries; first += rows)               \
        if ((rows = t->queries - first < h.rows ? t->queries - first : h.rows), 1)

static void forward_head(const void *job, int64_t unit) {
    const struct attention *t = job;
    struct head h;
    REAL *room = open_head(t, unit, &h);
    if (!room) abort();
    EACH_BLOCK(first, rows) {
        weights_of(t, &h, first, rows);
        times(rows, t->values, t->keys, h.p, h.wide, 1, h.from_v, t->values,
              t->o + (unit * t->queries + first) * t->values, t->values);
    }
    free(room);
}

static void backward_head(const void *job, int64_t unit) {
    const struct attention *t = job;
    const int64_t d = t->width, e = t->values, m = t->keys;
    struct head h;
    REAL *room = open_head(t, unit, &h), *gk = t->gk + unit * m * d, *gv = t->gv + unit * m * e;
    if (!room) abort();
    EACH_BLOCK(first, rows) {
        const REAL *u = t->u + (unit * t->queries + first) * e;
        weights_of(t, &h, first, rows);
        times(rows, h.wide, e, u, e, 1, h.v, h.wide, h.x, h.wide);
        for (int64_t r = 0; r < rows; r++) {
            REAL *p = h.p + r * h.wide, *x = h.x + r * h.wide;
            centre_row(h.wide, p, x);
            weigh_row(h.wide, p, (REAL)t->scale, x);
        }
        times(rows, d, m, h.x, h.wide, 1, h.from_k, d, t->gq + (unit * t->queries + first) * d, d);
        add_times(m, d, rows, h.x, 1, h.wide, h.from_q + first * d, d, gk, d);
        add_times(m, e, rows, h.p, 1, h.wide, u, e, gv, e);
    }
    free(room);
}

static void second_head(const void *job, int64_t unit) {
    const struct attention *t = job;
    const int64_t d = t->width, e = t->values, m = t->keys;
    struct head h;
    REAL *room = open_head(t, unit, &h), *gk = t->gk + unit * m * d, *gv = t->gv + unit * m * e;
    if (!room) abort();
    EACH_BLOCK(first, rows) {
        const int64_t row = unit * t->queries + first;
        const REAL *q = h.from_q + first * d, *a = t->a + row * d, *u = t->u + row * e;
        weights_of(t, &h, first, rows);
        times(rows, h.wide, e, u, e, 1, h.v, h.wide, h.x, h.wide);
        times(rows, h.wide, e, u, e, 1, h.c, h.wide, h.y, h.wide);
        times(rows, h.wide, d, a, d, 1, h.k, h.wide, h.t, h.wide);
        add_times(rows, h.wide, d, q, d, 1, h.b, h.wide, h.t, h.wide);
        for (int64_t r = 0; r < rows; r++) {
            REAL *p = h.p + r * h.wide, *x = h.x + r * h.wide, *s = h.t + r * h.wide, *y = h.y + r * h.wide;
            centre_row(h.wide, p, x);
            centre_row(h.wide, p, s);
            for (int64_t j = 0; j < h.wide; j += LANES) {
                vector slope = load(s + j) * (REAL)t->scale;
                store(s + j, slope);
                store(y + j, load(y + j) + slope * load(x + j));
            }
            centre_row(h.wide, p, y);
            weigh_row(h.wide, p, (REAL)t->scale, y);
            weigh_row(h.wide, p, (REAL)t->scale, x);
            weigh_row(h.wide, p, 1, s);
        }
        times(rows, d, m, h.y, h.wide, 1, h.from_k, d, t->gq + row * d, d);
        add_times(rows, d, m, h.x, h.wide, 1, t->b + unit * m * d, d, t->gq + row * d, d);
        add_times(m, d, rows, h.y, 1, h.wide, q, d, gk, d);
        add_times(m, d, rows, h.x, 1, h.wide, a, d, gk, d);
        add_times(m, e, rows, h.t, 1, h.wide, u, e, gv, e);
        times(rows, e, m, h.t, h.wide, 1, h.from_v, e, t->gu + row * e, e);
        add_times(rows, e, m, h.p, h.wide, 1, t->c + unit * m * e, e, t->gu + row * e, e);
    }
    free(room);
}

/* o. */
void attention(const struct attention *t, int64_t threads) { for_each_unit(t->heads, threads, forward_head, t); }

/* gq, gk and gv; the last two must be 0 before. */
void attention_backward(const struct attention *t, int64_t threads) {
    for_each_unit(t->heads, threads, backward_head, t);
}

/* The derivatives by q, k, v and u, in gq, gk, gv and gu; gk and gv must be 0 before. */
void attention_second(const struct attention *t, int64_t threads) {
    for_each_unit(t->heads, threads, second_head, t);
}

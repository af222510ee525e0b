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
};

static void transpose_keys(int64_t keys, int64_t width, int64_t wide, const REAL *from, REAL *to) {
    int64_t whole = keys / LANES * LANES;
    transpose(whole, width, from, to, wide);
    for (int64_t d = 0; d < width; d++)
        for (int64_t j = whole; j < wide; j++) to[d * wide + j] = j < keys ? from[j * width + d] : 0;
}

/* P of the queries from `first` on. */
static void weights_of(const struct attention *t, const struct head *h, int64_t first, int64_t rows) {
    times(rows, h->wide, t->width, t->q + (h->number * t->queries + first) * t->width, t->width, 1, h->k, h->wide,
          h->p, h->wide);
    const REAL *hides = t->mask ? t->mask + h->number / t->mask_every % t->masks *
                                                (t->mask_step ? t->queries * t->mask_step : t->keys) : NULL;
    for (int64_t r = 0; r < rows; r++)
        softmax_row(t, hides ? hides + (first + r) * t->mask_step : NULL, h->wide, h->p + r * h->wide);
}

typedef void (*block_body)(const struct attention *t, const struct head *h, int64_t first, int64_t rows);

/* Calls body for some queries at a time, from `first` on, whose P is there, and so are k, and v, b and c as far as its
 * derivative reads them, transposed. */
static void each_block(const struct attention *t, int64_t unit, block_body body) {
    struct head h = {.number = unit, .wide = (t->keys + LANES - 1) / LANES * LANES};
    if (h.wide % 256 == 0) h.wide += LANES;  /* else the rows of a column would share the same places of the cache */
    h.rows = BLOCK_NUMBERS / h.wide / ROWS * ROWS;
    if (h.rows < ROWS) h.rows = ROWS;
    if (h.rows > t->queries) h.rows = t->queries;
    const int64_t d = t->width, e = t->values, m = t->keys, block = h.rows * h.wide;
    REAL *room = aligned_alloc(64, ((4 * block + 2 * (d + e) * h.wide) * sizeof(REAL) + 63) / 64 * 64);
    if (!room) abort();
    h.p = room, h.x = room + block, h.t = room + 2 * block, h.y = room + 3 * block;
    h.k = room + 4 * block, h.v = h.k + d * h.wide, h.b = h.v + e * h.wide, h.c = h.b + d * h.wide;
    transpose_keys(m, d, h.wide, t->k + unit * m * d, h.k);
    if (t->u) transpose_keys(m, e, h.wide, t->v + unit * m * e, h.v);
    if (t->b) transpose_keys(m, d, h.wide, t->b + unit * m * d, h.b);
    if (t->c) transpose_keys(m, e, h.wide, t->c + unit * m * e, h.c);
    for (int64_t first = 0; first < t->queries; first += h.rows) {
        int64_t rows = t->queries - first < h.rows ? t->queries - first : h.rows;
        weights_of(t, &h, first, rows);
        body(t, &h, first, rows);
    }
    free(room);
}

static void forward_block(const struct attention *t, const struct head *h, int64_t first, int64_t rows) {
    const int64_t e = t->values, m = t->keys;
    times(rows, e, m, h->p, h->wide, 1, t->v + h->number * m * e, e, t->o + (h->number * t->queries + first) * e, e);
}

static void backward_block(const struct attention *t, const struct head *h, int64_t first, int64_t rows) {
    const int64_t d = t->width, e = t->values, m = t->keys, wide = h->wide, row = h->number * t->queries + first;
    const REAL *u = t->u + row * e;
    times(rows, wide, e, u, e, 1, h->v, wide, h->x, wide);
    for (int64_t r = 0; r < rows; r++) {
        REAL *p = h->p + r * wide, *x = h->x + r * wide;
        centre_row(wide, p, x);
        weigh_row(wide, p, (REAL)t->scale, x);
    }
    times(rows, d, m, h->x, wide, 1, t->k + h->number * m * d, d, t->gq + row * d, d);
    add_times(m, d, rows, h->x, 1, wide, t->q + row * d, d, t->gk + h->number * m * d, d);
    add_times(m, e, rows, h->p, 1, wide, u, e, t->gv + h->number * m * e, e);
}

static void second_block(const struct attention *t, const struct head *h, int64_t first, int64_t rows) {
    const int64_t d = t->width, e = t->values, m = t->keys, wide = h->wide, row = h->number * t->queries + first;
    const REAL *q = t->q + row * d, *a = t->a + row * d, *u = t->u + row * e;
    REAL *gq = t->gq + row * d, *gu = t->gu + row * e;
    REAL *gk = t->gk + h->number * m * d, *gv = t->gv + h->number * m * e;
    times(rows, wide, e, u, e, 1, h->v, wide, h->x, wide);
    times(rows, wide, e, u, e, 1, h->c, wide, h->y, wide);
    times(rows, wide, d, a, d, 1, h->k, wide, h->t, wide);
    add_times(rows, wide, d, q, d, 1, h->b, wide, h->t, wide);
    for (int64_t r = 0; r < rows; r++) {
        REAL *p = h->p + r * wide, *x = h->x + r * wide, *s = h->t + r * wide, *y = h->y + r * wide;
        centre_row(wide, p, x);
        centre_row(wide, p, s);
        for (int64_t j = 0; j < wide; j += LANES) {
            vector slope = load(s + j) * (REAL)t->scale;
            store(s + j, slope);
            store(y + j, load(y + j) + slope * load(x + j));
        }
        centre_row(wide, p, y);
        weigh_row(wide, p, (REAL)t->scale, y);
        weigh_row(wide, p, (REAL)t->scale, x);
        weigh_row(wide, p, 1, s);
    }
    times(rows, d, m, h->y, wide, 1, t->k + h->number * m * d, d, gq, d);
    add_times(rows, d, m, h->x, wide, 1, t->b + h->number * m * d, d, gq, d);
    add_times(m, d, rows, h->y, 1, wide, q, d, gk, d);
    add_times(m, d, rows, h->x, 1, wide, a, d, gk, d);
    add_times(m, e, rows, h->t, 1, wide, u, e, gv, e);
    times(rows, e, m, h->t, wide, 1, t->v + h->number * m * e, e, gu, e);
    add_times(rows, e, m, h->p, wide, 1, t->c + h->number * m * e, e, gu, e);
}

static void forward_head(const void *job, int64_t unit) { each_block(job, unit, forward_block); }
static void backward_head(const void *job, int64_t unit) { each_block(job, unit, backward_block); }
static void second_head(const void *job, int64_t unit) { each_block(job, unit, second_block); }

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

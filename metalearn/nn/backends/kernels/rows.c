/* Rows of numbers: those of packed parameters (packing.py). */

#include <string.h>

#include "kernels.h"

/* Between parameters [n], in an order of their own, and a row: number i of the row is number places[i] of the
 * parameters, or zero if places[i] is n. A tile of the row has `rows` pieces of TILE numbers, `step` numbers apart. In a
 * kernel's transposed order, such a tile is a few lines of memory on both sides. */
enum { TILE = 16 };
struct tile { int64_t first, rows, step; };
struct order { const struct tile *tiles; int64_t count; const int32_t *places; const REAL *from; REAL *to; };

static void pack_unit(const void *job, int64_t unit) {
    const struct order *o = job;
    const struct tile *tile = o->tiles + unit;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = tile->first + r * tile->step;
        EACH(i, TILE) o->to[at + i] = o->places[at + i] < o->count ? o->from[o->places[at + i]] : 0;
    }
}

static void unpack_unit(const void *job, int64_t unit) {
    const struct order *o = job;
    const struct tile *tile = o->tiles + unit;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = tile->first + r * tile->step;
        EACH(i, TILE) if (o->places[at + i] < o->count) o->to[o->places[at + i]] = o->from[at + i];
    }
}

/* The `count` parameters as a row, and back. */
void pack_row(int64_t tiles, const struct tile *tile, int64_t count, const int32_t *places, const REAL *from, REAL *to,
              int64_t threads) {
    struct order o = {tile, count, places, from, to};
    for_each_unit(tiles, threads, pack_unit, &o);
}

void unpack_row(int64_t tiles, const struct tile *tile, int64_t count, const int32_t *places, const REAL *from,
                REAL *to, int64_t threads) {
    struct order o = {tile, count, places, from, to};
    for_each_unit(tiles, threads, unpack_unit, &o);
}

/* Numbers that a unit sums, and those of one sum on the stack. */
enum { SHARE = 16384, BLOCK = 512 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The sum of `rows` rows of at most BLOCK numbers, whose beginnings are `step` numbers apart. Neighbours are added
 * first, then pairs of pairs: the first part has the largest power of two that is less than the rows. */
static void sum_block(int64_t rows, int64_t step, int64_t count, const REAL *from, REAL *to) {
    if (rows == 1) {
        memcpy(to, from, count * sizeof(REAL));
    } else if (rows == 2) {
        for (int64_t i = 0; i < count; i++) to[i] = from[i] + from[step + i];
    } else {
        REAL rest[BLOCK];
        int64_t first = (int64_t)1 << (63 - __builtin_clzll(rows - 1));
        sum_block(first, step, count, from, to);
        sum_block(rows - first, step, count, from + first * step, rest);
        for (int64_t i = 0; i < count; i++) to[i] += rest[i];
    }
}

struct summation { int64_t rows, count; const REAL *from; REAL *to; };

static void sum_unit(const void *job, int64_t unit) {
    const struct summation *s = job;
    int64_t end = least((unit + 1) * SHARE, s->count);
    for (int64_t at = unit * SHARE; at < end; at += BLOCK)
        sum_block(s->rows, s->count, least(BLOCK, end - at), s->from + at, s->to + at);
}

/* The sum of rows [rows, count] in pairs. */
void sum_rows(int64_t rows, int64_t count, const REAL *from, REAL *to, int64_t threads) {
    struct summation s = {rows, count, from, to};
    for_each_unit((count + SHARE - 1) / SHARE, threads, sum_unit, &s);
}

/* Rows of numbers: those of packed parameters (packing.py). */

#include <string.h>

#include "kernels.h"

/* Numbers that a unit computes, and those of one sum on the stack. */
enum { SHARE = 16384, BLOCK = 512 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t shares(int64_t count) { return (count + SHARE - 1) / SHARE; }

struct gathering { int64_t count; const int32_t *places; const REAL *from; REAL *to; };

static void gather_unit(const void *job, int64_t unit) {
    const struct gathering *g = job;
    int64_t end = least((unit + 1) * SHARE, g->count);
    for (int64_t i = unit * SHARE; i < end; i++) g->to[i] = g->from[g->places[i]];
}

/* to[i] = from[places[i]] */
void gather(int64_t count, const int32_t *places, const REAL *from, REAL *to, int64_t threads) {
    struct gathering g = {count, places, from, to};
    for_each_unit(shares(count), threads, gather_unit, &g);
}

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
    for_each_unit(shares(count), threads, sum_unit, &s);
}

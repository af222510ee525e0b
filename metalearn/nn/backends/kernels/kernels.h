/* Shared by the kernels: vectors, and units of work.
 *
 * All arrays are dense; the last index is the fastest: images [task][sample][row][column][channel], kernels
 * [task][kernel row][kernel column][input channel][output channel]. The code is compiled with REAL=float and with
 * REAL=double. The work is divided into units. Each unit computes in a fixed order, and no two write to the same place,
 * so that the number of threads changes no bit. If vectors run over channels, the number of channels must be a multiple
 * of LANES; the caller ensures this.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

/* A tile of ROWS × VECTORS sums takes VECTORS operands and a factor besides: 29 of the 32 registers of AVX-512 and NEON,
 * 15 of the 16 of AVX. */
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, ROWS = 6, VECTORS = 4 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, ROWS = 6, VECTORS = 2 };
#else
enum { VECTOR_BYTES = 16, ROWS = 6, VECTORS = 4 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(REAL) };
enum { LOG_LANES = LANES == 16 ? 4 : LANES == 8 ? 3 : LANES == 4 ? 2 : 1 };

/* aligned: channels begin at any number. may_alias: the numbers that it covers are read and written one by one, too. */
typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

typedef __typeof__((vector){0} > (vector){0}) mask;

#define INLINE static inline __attribute__((always_inline))

/* A loop that is fully unrolled, so that the arrays in it become registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

INLINE vector load(const REAL *p) { return *(const vector *)p; }
INLINE void store(REAL *p, vector v) { *(vector *)p = v; }

/* A convolution. */
struct geometry { int64_t tasks, samples, height, width, inputs, out_height, out_width, outputs, kernel_height,
                  kernel_width, stride, padding; };

INLINE int64_t tap_count(const struct geometry *g) { return g->kernel_height * g->kernel_width; }

/* Calls TILE(rows, vectors) with constants, so that the compiler knows both numbers. */
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

/* How many vectors the next block of columns has: VECTORS, or 2, or 1. */
INLINE int vectors_left(int64_t columns) {
    return columns >= VECTORS * LANES ? VECTORS : columns >= 2 * LANES ? 2 : 1;
}

/* How many rows the next tile has, if all tiles have nearly the same number: 7 rows are 4 and 3. After 6, a single row
 * would have too few sums at once, and wait for each product. */
INLINE int next_rows(int64_t left) {
    int64_t tiles = (left + ROWS - 1) / ROWS;
    return (int)((left + tiles - 1) / tiles);
}

/* [inputs][outputs] → [outputs][inputs], whose rows are to_width apart; both are multiples of LANES. */
void transpose(int64_t inputs, int64_t outputs, const REAL *from, REAL *to, int64_t to_width);

/* Calls body(job, unit) for every unit, on `threads` threads, and returns when all units are done. */
typedef void (*unit_body)(const void *job, int64_t unit);
void for_each_unit(int64_t units, int64_t threads, unit_body body, const void *job);

#endif

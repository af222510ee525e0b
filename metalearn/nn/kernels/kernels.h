/* What the kernels share: vectors, and work in units.
 *
 * All arrays are dense, the last index the fastest: images [task][sample][row][column][channel], kernels
 * [task][kernel row][kernel column][input channel][output channel]. Compiled once with REAL=float, once with
 * REAL=double. The work is cut into units that write to places of their own, each in a fixed order, so that the
 * number of threads changes no bit. Channels that vectors run over are multiples of LANES: the caller sees to it.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, ROWS = 6, VECTORS = 4 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, ROWS = 6, VECTORS = 2 };
#else
enum { VECTOR_BYTES = 16, ROWS = 6, VECTORS = 4 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(REAL) };
enum { LOG_LANES = LANES == 16 ? 4 : LANES == 8 ? 3 : LANES == 4 ? 2 : 1 };

typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

typedef __typeof__((vector){0} > (vector){0}) mask;

#define INLINE static inline __attribute__((always_inline))

/* A loop that is unrolled whole, so that the arrays in it become registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

INLINE vector load(const REAL *p) { return *(const vector *)p; }
INLINE void store(REAL *p, vector v) { *(vector *)p = v; }

/* Of a convolution. */
struct geometry { int64_t tasks, samples, height, width, inputs, out_height, out_width, outputs, kernel_height,
                  kernel_width, stride, padding; };

INLINE int64_t tap_count(const struct geometry *g) { return g->kernel_height * g->kernel_width; }

/* Calls body(job, unit) for every unit, on so many threads; returns when all are done. */
typedef void (*unit_body)(const void *job, int64_t unit);
void for_each_unit(int64_t units, int64_t threads, unit_body body, const void *job);

#endif

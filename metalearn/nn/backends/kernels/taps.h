/* Convolutions of one task, by a plan of the pixels that each tap of a kernel joins. */

#ifndef TAPS_H
#define TAPS_H

#include "kernels.h"

/* Pixels of a result that the same taps reach. The operand's pixel of tap k begins at from[pixel] + shift[k], and the
 * result's at to[pixel]. */
struct reach { int32_t pixels, taps, *tap, *shift, *from, *to; };

/* The pairs (input pixel, output pixel) that a tap joins, in a block of output pixels. */
struct joint { int32_t tap, pairs, *in, *out; };

/* A convolution of some samples: what reaches each output pixel, what reaches each input pixel, and the joints. With
 * `filtered`, Winograd's filtering stands in place of the first two. */
struct taps {
    struct geometry geometry;
    int filtered;
    int64_t forward_count, backward_count, joint_count;
    struct reach *forward, *backward;
    struct joint *joints;
};

/* Two factors of a sum of products; or one, if sources is 1. */
struct factors { int sources; const REAL *left[2], *right[2]; };

/* What a plan is for. The last two tell a network from a layer alone; they round differently, and each keeps its bits:
 * FILTERED allows Winograd's filtering, and BY_ROWS adds up input gradients block by block of output rows. */
enum wanted { PRODUCT = 1, INPUT_GRADIENT = 2, WEIGHT_GRADIENT = 4, FILTERED = 8, BY_ROWS = 16 };

/* Makes the plan for what is `wanted`, a sum of the above. Returns 0 if memory or 32 bits do not do. */
int make_taps(const struct geometry *g, int wanted, struct taps *t);
void free_taps(struct taps *t);

/* How many numbers of scratch memory the next two functions need. */
int64_t taps_scratch(const struct taps *t);

/* Σ over sources of images ∗ kernels; `left` are images, `right` kernels. With `add`, it is added to the result. */
void tap_product(const struct taps *t, struct factors f, REAL *result, int add, REAL *scratch, int64_t threads);

/* Σ over sources of the derivatives by images; `left` are output gradients, `right` kernels transposed by
 * `transpose_kernels`. */
void tap_input_gradient(const struct taps *t, struct factors f, REAL *result, int add, REAL *scratch,
                        int64_t threads);

/* Σ over sources of the derivatives by kernels; `left` are images, `right` output gradients. With `add`, it is added to the
 * result. */
void tap_weight_gradient(const struct taps *t, struct factors f, REAL *result, int add, int64_t threads);

/* Σ over sources of left [rows][depth] · right [depth][width] → result [rows][width]. */
void multiply(int64_t rows, int64_t depth, int64_t width, struct factors f, REAL *result);

/* Kernels [tap][input][output] → [tap][output][input]. */
void transpose_kernels(const struct geometry *g, const REAL *weight, REAL *transposed);

#endif

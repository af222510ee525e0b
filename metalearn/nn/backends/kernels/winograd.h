/* Convolutions by 3×3 kernels with fewer multiplications. */

#ifndef WINOGRAD_H
#define WINOGRAD_H

#include "taps.h"

/* Whether a convolution can be computed so, and gains from it. */
int winograd_fits(const struct geometry *g);

/* How many numbers of scratch memory it needs. */
int64_t winograd_scratch(const struct geometry *g);

/* Σ over sources of images ∗ kernels. `left` are images of `depth` channels, `right` kernels [tap][depth][width]; with
 * `turned`, the kernels are turned by 180°, as the input gradient needs them. With `add`, it is added to the result. */
void winograd(const struct geometry *g, struct factors f, int64_t depth, int64_t width, int turned, REAL *result,
              int add, REAL *scratch, int64_t threads);

#endif

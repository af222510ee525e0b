/* Batch norm with a leaky ReLU behind it, and its first and second derivatives. */

#ifndef NORM_H
#define NORM_H

#include "kernels.h"

/* x [task][rows][channels]. Or x is not stored, but computed where it is needed: for one task, as the product of
 * `windows` [rows][depth] and `kernels` [depth][channels]. Then the backward pass gives g_kernels, and no gx.
 *
 * With x̂ = (x − mean) · rstd and z = γ x̂ + β, y = z where z > 0, else slope · z: slope 0 is the ReLU, slope 1 is no
 * activation. The statistics [task][channels] are those of the first `measured` rows. γ and β of two tasks are
 * scale_step apart; it is 0 if all tasks share them. Below, Σ is a sum over all rows, and Σ′ is a sum over the m measured
 * rows. Terms in braces belong to measured rows only. */
struct norm {
    int64_t tasks, rows, measured, channels, scale_step;
    REAL epsilon, slope;
    int64_t depth;
    const REAL *windows, *kernels;
    REAL *g_kernels;
    const REAL *x, *scale, *shift, *gy, *v, *v_scale, *v_shift, *scale_gradient, *shift_gradient;
    REAL *mean, *rstd, *y, *gx, *g_scale, *g_shift, *ggy, *hx, *h_scale;
};

void norm(const struct norm *n, int64_t threads);
void norm_backward(const struct norm *n, int64_t threads);
void norm_second(const struct norm *n, int64_t threads);

#endif

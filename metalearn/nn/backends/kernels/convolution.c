/* Convolution of one layer, with separate kernels for every task: the product, and its derivatives by images and by
 * kernels.
 *
 * taps.c computes, by a plan that is made for the call; it costs little beside the products. Winograd's filtering does
 * not: its rounding is another, and what is trained layer by layer keeps its bits.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "taps.h"

/* Numbers of the samples of a plan. A plan has pixels of all samples: this bounds its memory, and keeps offsets within
 * 32 bits. */
enum { PLAN_NUMBERS = 1 << 22 };

struct convolution {
    const struct taps *taps;
    enum wanted wanted;
    int64_t left_step, right_step, result_step, threads;
    const REAL *left, *right;
    REAL *result;
    int add;
};

static void task_unit(const void *job, int64_t task) {
    const struct convolution *c = job;
    const struct factors f = {1, {c->left + task * c->left_step}, {c->right + task * c->right_step}};
    REAL *result = c->result + task * c->result_step;
    if (c->wanted == PRODUCT) tap_product(c->taps, f, result, 0, NULL, c->threads);
    else if (c->wanted == INPUT_GRADIENT) tap_input_gradient(c->taps, f, result, 0, NULL, c->threads);
    else tap_weight_gradient(c->taps, f, result, c->add, c->threads);
}

/* Computes what is wanted for some samples of every task after the others. Tasks on threads; or, if there are fewer
 * tasks, one after the other, each on all threads. */
static void convolve(const struct geometry *g, struct convolution c, int64_t threads) {
    const int64_t in = g->height * g->width * g->inputs, out = g->out_height * g->out_width * g->outputs;
    const int64_t left = c.wanted == INPUT_GRADIENT ? out : in, most = PLAN_NUMBERS / (in + out);
    const int64_t right = c.wanted == WEIGHT_GRADIENT ? out : 0;
    const int64_t result = c.wanted == PRODUCT ? out : c.wanted == INPUT_GRADIENT ? in : 0;
    const int inside = threads > g->tasks;
    struct geometry part = *g;
    struct taps taps = {0};
    c.left_step = g->samples * left, c.taps = &taps, c.threads = inside ? threads : 1;
    if (right) c.right_step = g->samples * right;
    c.result_step = result ? g->samples * result : tap_count(g) * g->inputs * g->outputs;
    for (int64_t first = 0; first < g->samples; first += part.samples) {
        part.samples = g->samples - first;
        if (part.samples > most) part.samples = most > 1 ? most : 1;
        if (part.samples != taps.geometry.samples) {
            free_taps(&taps);
            if (!make_taps(&part, c.wanted | BY_ROWS, &taps)) {
                fprintf(stderr, "the compiled convolution: images of %lld numbers are too large\n", (long long)in);
                abort();
            }
        }
        c.add = first > 0;
        for_each_unit(g->tasks, inside ? 1 : threads, task_unit, &c);
        c.left += part.samples * left, c.right += part.samples * right, c.result += part.samples * result;
    }
    free_taps(&taps);
}

/* y = x ∗ w; weight_step is 0 if all tasks share one kernel. */
void product(const struct geometry *g, const REAL *x, const REAL *weight, int64_t weight_step, REAL *y,
             int64_t threads) {
    convolve(g, (struct convolution){.wanted = PRODUCT, .left = x, .right = weight, .right_step = weight_step,
                                     .result = y}, threads);
}

struct transposition { int64_t inputs, outputs; const REAL *from; REAL *to; };

/* Transposes LANES × LANES numbers by exchanging ever smaller squares. clang has no shuffle by variable places. */
INLINE void transpose_square(const REAL *from, int64_t from_width, REAL *to, int64_t to_width) {
#ifdef __clang__
    EACH(r, LANES)
        EACH(c, LANES) to[c * to_width + r] = from[r * from_width + c];
#else
    vector row[LANES];
    EACH(r, LANES) row[r] = load(from + r * from_width);
    EACH(round, LOG_LANES) {
        const int half = LANES >> (round + 1);
        mask low, high;
        EACH(lane, LANES) {
            low[lane] = lane & half ? LANES + lane - half : lane;
            high[lane] = lane & half ? LANES + lane : lane + half;
        }
        EACH(r, LANES)
            if (!(r & half)) {
                vector a = row[r], b = row[r + half];
                row[r] = __builtin_shuffle(a, b, low);
                row[r + half] = __builtin_shuffle(a, b, high);
            }
    }
    EACH(r, LANES) store(to + r * to_width, row[r]);
#endif
}

void transpose(int64_t inputs, int64_t outputs, const REAL *from, REAL *to, int64_t to_width) {
    for (int64_t o = 0; o < outputs; o += LANES)
        for (int64_t i = 0; i < inputs; i += LANES)
            transpose_square(from + i * outputs + o, outputs, to + o * to_width + i, to_width);
}

static void transpose_unit(const void *job, int64_t unit) {
    const struct transposition *t = job;
    int64_t kernel = t->inputs * t->outputs;
    transpose(t->inputs, t->outputs, t->from + unit * kernel, t->to + unit * kernel, t->inputs);
}

/* The derivative of ⟨gy, x ∗ w⟩ by x. */
void input_gradient(const struct geometry *g, const REAL *gy, const REAL *weight, int64_t weight_step, REAL *gx,
                    int64_t threads) {
    int64_t kernels = (weight_step ? g->tasks : 1) * tap_count(g);
    REAL *transposed = malloc(kernels * g->inputs * g->outputs * sizeof(REAL));
    struct transposition t = {g->inputs, g->outputs, weight, transposed};
    for_each_unit(kernels, threads, transpose_unit, &t);
    convolve(g, (struct convolution){.wanted = INPUT_GRADIENT, .left = gy, .right = transposed,
                                     .right_step = weight_step, .result = gx}, threads);
    free(transposed);
}

/* The derivative of ⟨gy, x ∗ w⟩ by w. */
void weight_gradient(const struct geometry *g, const REAL *gy, const REAL *x, REAL *gw, int64_t threads) {
    convolve(g, (struct convolution){.wanted = WEIGHT_GRADIENT, .left = x, .right = gy, .result = gw}, threads);
}

/* A whole network, task after task, so that a task's numbers stay in the cache.
 *
 * The Hessian-vector product follows Pearlmutter 1994: every number of the gradient's computation gets a tangent, its
 * derivative along the direction. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#include "network.h"
#include "norm.h"
#include "taps.h"

enum { MAX_LAYERS = 96 };

/* The places of a value, and of what belongs to it, in a task's memory: kept numbers first, then scratch. `extra` is
 * the layer's own: the statistics of a norm and its parameters' gradients, or the places of a pool's maxima. `moved` is
 * the part of the tangent of a norm's input gradient that comes from the tangent of its input. Where only the loss is
 * wanted, values lie at `alone` and `extra_alone`: a value takes the place of others that nothing reads any more. */
struct place { int64_t size, value, gradient, extra, tangent, change, moved, alone, extra_alone; };

/* A task's values take `values` numbers, and what it keeps for a product takes `kept`, gradients included; in all it
 * needs `scratch`. Two of the largest kernels, of `kernel` numbers each, have their place at `kernels`, and what
 * convolutions need is at `work`. `alone`, `work_alone` and `last_alone`, the place of the last value's gradient, are
 * those of a task whose loss or outputs only are wanted. */
struct plan {
    int64_t count, samples, parameters, inputs, values, kept, scratch, kernel, kernels, work, alone, work_alone, last_alone;
    int64_t input[3];
    struct layer layers[MAX_LAYERS];
    struct taps taps[MAX_LAYERS];
    struct place places[MAX_LAYERS + 1];
};

/* Plans */

static struct geometry geometry_of(const struct plan *p, int64_t i) {
    const struct layer *l = p->layers + i, *before = l->from ? p->layers + l->from - 1 : NULL;
    int64_t height = before ? before->height : 1, width = before ? before->width : 1;
    int64_t inputs = before ? before->channels : p->inputs;
    if (l->height == 1 && l->width == 1 && l->kernel == 0)  /* a linear layer: all pixels at once */
        return (struct geometry){1, p->samples, 1, 1, height * width * inputs, 1, 1, l->channels, 1, 1, 1, 0};
    return (struct geometry){1, p->samples, height, width, inputs, l->height, l->width, l->channels, l->kernel,
                             l->kernel, l->stride, l->padding};
}

static int64_t taken(int64_t *used, int64_t count) {
    int64_t at = *used;
    *used += (count + LANES - 1) / LANES * LANES;
    return at;
}

static int64_t extra_size(const struct layer *l, int64_t size) {
    return l->kind == NORM ? 4 * l->channels : l->kind == POOL ? size : 0;
}

/* How many layers read a value. */
static int readers(const struct plan *p, int64_t value) {
    int count = 0;
    for (int64_t i = 0; i < p->count; i++)
        count += (p->layers[i].from == value) + (p->layers[i].kind == SUM && p->layers[i].other == value);
    return count;
}

static void lay_out(struct plan *p) {
    for (int64_t i = p->count; i > 0; i--) {
        const struct layer *l = p->layers + i - 1;
        struct place *place = p->places + i;
        place->size = p->samples * l->height * l->width * l->channels;
        place->value = taken(&p->values, place->size);
        place->extra = taken(&p->values, extra_size(l, place->size));
    }
    p->kept = p->values;
    for (int64_t i = p->count; i > 0; i--) {
        const struct layer *l = p->layers + i - 1;
        struct place *place = p->places + i;
        if (l->kind == WINDOWS) continue;  /* inputs have no derivatives */
        if (place->gradient < 0) place->gradient = taken(&p->kept, place->size);
        if (l->kind == SUM) {  /* both parts of a sum have its gradient */
            if (l->from && readers(p, l->from) == 1) p->places[l->from].gradient = place->gradient;
            if (l->other && readers(p, l->other) == 1) p->places[l->other].gradient = place->gradient;
        }
    }
    p->scratch = p->kept;
    for (int64_t i = p->count; i > 0; i--) {
        const struct layer *l = p->layers + i - 1;
        struct place *place = p->places + i;
        if (l->kind == WINDOWS) continue;
        place->tangent = taken(&p->scratch, place->size);
        place->change = taken(&p->scratch, place->size);
        if (l->kind == NORM) place->moved = taken(&p->scratch, p->places[l->from].size);
    }
    int64_t work = 0;
    for (int64_t i = 0; i < p->count; i++) {
        if (p->layers[i].kind != CONVOLUTION) continue;
        const struct geometry *g = &p->taps[i].geometry;
        int64_t size = tap_count(g) * g->inputs * g->outputs, needed = taps_scratch(p->taps + i);
        if (size > p->kernel) p->kernel = size;
        if (needed > work) work = needed;
    }
    p->kernels = taken(&p->scratch, 2 * p->kernel);
    p->work = taken(&p->scratch, work);
}

/* Places for values where only the loss is wanted. */
static void lay_out_alone(struct plan *p) {
    int64_t last[MAX_LAYERS + 1] = {0}, count = 0;  /* the last layer that reads a value */
    for (int64_t v = 1; v <= p->count; v++) {
        const struct layer *l = p->layers + v - 1;
        last[l->from] = v;
        if (l->kind == SUM) last[l->other] = v;
        if (l->kind == NORM) last[p->layers[l->from - 1].from] = v;  /* it may compute the convolution before it */
    }
    last[p->count] = p->count + 1;
    struct { int64_t at, size, until; } slots[MAX_LAYERS];
    for (int64_t v = 1; v <= p->count; v++) {
        struct place *place = p->places + v;
        int64_t found = count;
        for (int64_t i = 0; i < count; i++) {
            const int fits = slots[i].until < v && slots[i].size >= place->size;
            if (fits && (found == count || slots[i].size < slots[found].size)) found = i;
        }
        if (found == count) {
            slots[count].size = place->size;
            slots[count++].at = taken(&p->alone, place->size);
        }
        slots[found].until = last[v];
        place->alone = slots[found].at;
        place->extra_alone = taken(&p->alone, extra_size(p->layers + v - 1, place->size));
    }
    p->last_alone = taken(&p->alone, p->places[p->count].size);
    p->work_alone = taken(&p->alone, p->scratch - p->work);
}

static int has_derivative(const struct plan *p, int64_t value) {
    return value && p->layers[value - 1].kind != WINDOWS;
}

void free_plan(struct plan *p) {
    for (int64_t i = 0; i < p->count; i++)
        if (p->layers[i].kind == CONVOLUTION) free_taps(p->taps + i);
    free(p);
}

struct plan *new_plan(const struct layer *layers, int64_t count, const int64_t *input, int64_t parameters,
                      int64_t samples) {
    struct plan *p = count > MAX_LAYERS ? NULL : calloc(1, sizeof *p);
    if (!p) return NULL;
    p->samples = samples, p->parameters = parameters, p->inputs = input[0] * input[1] * input[2];
    memcpy(p->input, input, sizeof p->input);
    memcpy(p->layers, layers, count * sizeof *layers);
    for (; p->count < count; p->count++) {
        struct geometry g = geometry_of(p, p->count);
        if (p->layers[p->count].kind != CONVOLUTION) continue;
        const int backward = has_derivative(p, layers[p->count].from) ? INPUT_GRADIENT : 0;
        if (!make_taps(&g, PRODUCT | WEIGHT_GRADIENT | FILTERED | backward, p->taps + p->count)) {
            free_plan(p);
            return NULL;
        }
    }
    for (int64_t i = 0; i <= count; i++) p->places[i].gradient = -1;
    lay_out(p);
    lay_out_alone(p);
    return p;
}

int64_t kept_size(const struct plan *plan) { return plan->kept; }
int64_t values_size(const struct plan *plan) { return plan->values; }

/* A task */

struct task {
    const struct plan *plan;
    const struct call *call;
    const REAL *parameters, *x, *direction;
    const int64_t *labels;
    const REAL *targets;
    REAL *kept, *gradients, *scratch, *kernels, *work;
    int64_t threads;     /* inside the task */
    int alone, differs;  /* whether no derivative is wanted; whether a product may be */
};

INLINE REAL *value_of(const struct task *t, int64_t v) {
    const struct place *place = t->plan->places + v;
    return t->kept + (t->alone ? place->alone : place->value);
}
INLINE REAL *gradient_of(const struct task *t, int64_t v) {
    return t->alone ? t->kept + t->plan->last_alone : t->gradients + t->plan->places[v].gradient - t->plan->values;
}
INLINE REAL *extra_of(const struct task *t, int64_t v) {
    const struct place *place = t->plan->places + v;
    return t->kept + (t->alone ? place->extra_alone : place->extra);
}
INLINE REAL *tangent_of(const struct task *t, int64_t v) {
    return t->scratch + t->plan->places[v].tangent - t->plan->kept;
}
INLINE REAL *change_of(const struct task *t, int64_t v) {
    return t->scratch + t->plan->places[v].change - t->plan->kept;
}
INLINE REAL *moved_of(const struct task *t, int64_t v) {
    return t->scratch + t->plan->places[v].moved - t->plan->kept;
}
INLINE const REAL *operand_of(const struct task *t, int64_t v) { return v ? value_of(t, v) : t->x; }

INLINE int64_t size_of(const struct task *t, int64_t v) { return t->plan->places[v].size; }

INLINE int64_t pixels_of(const struct task *t, int64_t v) {
    const struct layer *l = t->plan->layers + v - 1;
    return t->plan->samples * l->height * l->width;
}

/* Four sweeps go over the layers, and KINDS has a function for each: forward over the values, and over their tangents;
 * backward over the gradients, and over their tangents, the changes. Where a layer is linear, one function does for
 * two sweeps. */

/* A layer in a forward sweep: what it reads (`other` for a sum only), and what it gives. Inputs have no tangent: `x` is
 * NULL. Over tangents, `product` has the parameters' part of the Hessian-vector product. */
struct forward { const REAL *x, *other; REAL *y, *product; };

/* A layer in a backward sweep: from `gy`, what it gives for its input (NULL: it needs none), for the other one of a sum,
 * and for the parameters. With `add`, something is there already. */
struct backward { const REAL *gy; REAL *gx, *g_other, *parameters; int add, add_other; };

typedef void forward_function(const struct task *t, const struct layer *l, int64_t v, struct forward f);
typedef void backward_function(const struct task *t, const struct layer *l, int64_t v, struct backward b);

/* Layers without parameters */

INLINE void add_to(REAL *restrict sum, const REAL *restrict x, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] += x[i];
}

/* `to` may be `x`: both parts of a sum can have its gradient for theirs (lay_out). */
static void set_or_add(REAL *to, const REAL *x, int64_t count, int add) {
    if (add) add_to(to, x, count);
    else if (to != x) memcpy(to, x, count * sizeof(REAL));
}

/* f(x), and its first and second derivative; f is not a leaky ReLU. */
INLINE void activated(int64_t activation, REAL x, REAL *y, REAL *first, REAL *second) {
    if (activation == TANH) {
        *y = tanh(x);
        *first = 1 - *y * *y;
        *second = -2 * *y * *first;
    } else {
        REAL down = exp(-fabs(x)), sigmoid = (x > 0 ? 1 : down) / (1 + down);
        *y = (x > 0 ? x : 0) + log1p(down);
        *first = sigmoid, *second = sigmoid * (1 - sigmoid);
    }
}

/* y = f(x). */
static void activate(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    const int64_t size = size_of(t, v);
    const REAL *restrict x = f.x, slope = (REAL)l->slope;
    REAL *restrict y = f.y, first, second;
    if (l->activation == LEAKY)  /* a loop of its own, which becomes vectors */
        for (int64_t i = 0; i < size; i++) y[i] = x[i] > 0 ? x[i] : x[i] * slope;
    else
        for (int64_t i = 0; i < size; i++) {
            activated(l->activation, x[i], y + i, &first, &second);
            if (i % l->channels >= l->used) y[i] = 0;  /* f(0) need not be 0 */
        }
}

/* dy = f′(x) dx, or with `add` it is added. It is the tangent of y from that of x, and gx from gy. */
static void activate_along(const struct layer *l, int64_t size, const REAL *restrict x, const REAL *dx, REAL *dy,
                           int add) {
    const REAL slope = (REAL)l->slope;
    REAL y, first, second;
    if (l->activation == LEAKY && !add)
        for (int64_t i = 0; i < size; i++) dy[i] = x[i] > 0 ? dx[i] : dx[i] * slope;
    else
        for (int64_t i = 0; i < size; i++) {
            if (l->activation == LEAKY) first = x[i] > 0 ? 1 : slope;
            else activated(l->activation, x[i], &y, &first, &second);
            dy[i] = (i % l->channels < l->used ? first * dx[i] : 0) + (add ? dy[i] : 0);
        }
}

static void activate_tangents(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    activate_along(l, size_of(t, v), value_of(t, l->from), f.x, f.y, 0);
}

static void activate_backward(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    activate_along(l, size_of(t, v), value_of(t, l->from), b.gy, b.gx, b.add);
}

/* The tangent of gx also has f″(x) gy times the tangent of x. */
static void activate_changes(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    const REAL *x = value_of(t, l->from), *gy = gradient_of(t, v), *dx = tangent_of(t, l->from);
    REAL y, first, second;
    activate_backward(t, l, v, b);
    if (l->activation == LEAKY) return;
    for (int64_t i = 0; i < size_of(t, v); i++) {
        activated(l->activation, x[i], &y, &first, &second);
        if (i % l->channels < l->used) b.gx[i] += second * gy[i] * dx[i];
    }
}

/* One channel of the pixels that a tap of a kernel sees, for a row of windows; beyond the image they are zero. */
static void gather_row(const struct plan *p, const struct layer *l, const REAL *image, int64_t row, int64_t tap,
                       REAL *to) {
    const int64_t y = row * l->stride + tap / l->kernel - l->padding, shift = tap % l->kernel - l->padding;
    const int64_t width = y >= 0 && y < p->input[1] ? p->input[2] : 0;
    int64_t first = shift < 0 ? (-shift + l->stride - 1) / l->stride : 0;
    int64_t end = width > shift ? (width - shift + l->stride - 1) / l->stride : 0;
    if (end > l->width) end = l->width;
    if (first > end) first = end;
    image += y * p->input[2] + shift;
    for (int64_t column = 0; column < first; column++) to[column * l->channels] = 0;
    for (int64_t column = first; column < end; column++) to[column * l->channels] = image[column * l->stride];
    for (int64_t column = end; column < l->width; column++) to[column * l->channels] = 0;
}

static void gather_windows(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    const int64_t *in = t->plan->input;
    REAL *to = f.y;
    (void)v;
    for (int64_t i = 0; i < t->plan->samples * l->height; i++, to += l->width * l->channels)
        for (int64_t tap = 0; tap < l->kernel * l->kernel; tap++)
            for (int64_t c = 0; c < in[0]; c++) {
                const REAL *image = t->x + (i / l->height * in[0] + c) * in[1] * in[2];
                gather_row(t->plan, l, image, i % l->height, tap, to + tap * in[0] + c);
            }
}

/* The four pixels that a pixel of a pool is the largest of; they begin at `at`. */
struct window { int64_t at[4]; };

INLINE struct window window_of(const struct task *t, const struct layer *l, int64_t pixel) {
    const struct layer *before = t->plan->layers + l->from - 1;
    int64_t column = pixel % l->width * 2, row = pixel / l->width % l->height * 2, c = l->channels;
    int64_t first = ((pixel / l->width / l->height * before->height + row) * before->width + column) * c;
    return (struct window){{first, first + c, first + before->width * c, first + (before->width + 1) * c}};
}

static void pool(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    const REAL *x = f.x;
    REAL *y = f.y, *place = extra_of(t, v);
    for (int64_t p = 0; p < pixels_of(t, v); p++, y += l->channels, place += l->channels) {
        struct window w = window_of(t, l, p);
        for (int64_t c = 0; c < l->channels; c++) {
            REAL best = x[w.at[0] + c], where = 0;
            EACH(k, 4) {
                REAL other = x[w.at[k] + c];
                where = other > best ? k : where;
                best = other > best || other != other ? other : best;  /* a NaN stays, as in torch */
            }
            y[c] = best, place[c] = where;
        }
    }
}

/* The tangent of a pool: that of its maxima. */
static void pool_tangents(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    const REAL *dx = f.x, *place = extra_of(t, v);
    REAL *dy = f.y;
    for (int64_t p = 0; p < pixels_of(t, v); p++, dy += l->channels, place += l->channels) {
        struct window w = window_of(t, l, p);
        for (int64_t c = 0; c < l->channels; c++) {
            REAL sum = 0;
            EACH(k, 4) sum = place[c] == k ? dx[w.at[k] + c] : sum;
            dy[c] = sum;
        }
    }
}

static void pool_backward(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    const REAL *gy = b.gy, *place = extra_of(t, v);
    REAL *gx = b.gx;
    if (!b.add) memset(gx, 0, size_of(t, l->from) * sizeof(REAL));
    for (int64_t p = 0; p < pixels_of(t, v); p++, gy += l->channels, place += l->channels) {
        struct window w = window_of(t, l, p);
        EACH(k, 4)
            for (int64_t c = 0; c < l->channels; c++) gx[w.at[k] + c] += place[c] == k ? gy[c] : 0;
    }
}

/* The mean over a sample's pixels. */
static void mean(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    const int64_t pixels = pixels_of(t, l->from) / pixels_of(t, v);
    const REAL *x = f.x;
    REAL *y = f.y;
    for (int64_t s = 0; s < t->plan->samples; s++, y += l->channels) {
        for (int64_t c = 0; c < l->channels; c++) y[c] = 0;
        for (int64_t p = 0; p < pixels; p++, x += l->channels)
            for (int64_t c = 0; c < l->channels; c++) y[c] += x[c];
        for (int64_t c = 0; c < l->channels; c++) y[c] /= (REAL)pixels;
    }
}

static void mean_backward(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    const int64_t pixels = pixels_of(t, l->from) / pixels_of(t, v), add = b.add;
    const REAL *gy = b.gy;
    REAL *gx = b.gx;
    for (int64_t s = 0; s < t->plan->samples; s++, gy += l->channels)
        for (int64_t p = 0; p < pixels; p++, gx += l->channels)
            for (int64_t c = 0; c < l->channels; c++) gx[c] = gy[c] / (REAL)pixels + (add ? gx[c] : 0);
}

static void sum(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    (void)l;
    memcpy(f.y, f.x, size_of(t, v) * sizeof(REAL));
    add_to(f.y, f.other, size_of(t, v));
}

static void sum_backward(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    (void)l;
    set_or_add(b.gx, b.gy, size_of(t, v), b.add);
    set_or_add(b.g_other, b.gy, size_of(t, v), b.add_other);
}

/* Norms, and the convolutions before them */

static struct norm norm_of(const struct task *t, const struct layer *l, int64_t v) {
    int64_t pixels = l->height * l->width, measured = t->call->support_size ? t->call->support_size : t->plan->samples;
    REAL *extra = extra_of(t, v);
    return (struct norm){
        .tasks = 1, .rows = t->plan->samples * pixels, .measured = measured * pixels, .channels = l->channels,
        .epsilon = (REAL)l->epsilon, .slope = (REAL)l->slope, .x = value_of(t, l->from),
        .scale = t->parameters + l->weight, .shift = t->parameters + l->bias,
        .mean = extra, .rstd = extra + l->channels,
    };
}

/* If this norm's input is a convolution of windows that nothing else reads, and no product will follow: has the input
 * computed where it is needed, not stored. Gives the convolution, or NULL. */
static const struct layer *fuse(const struct task *t, const struct layer *l, struct norm *n) {
    const struct layer *c = t->plan->layers + l->from - 1;
    if (t->differs || c->kind != CONVOLUTION || !c->from || has_derivative(t->plan, c->from) || c->bias >= 0)
        return NULL;
    n->depth = t->plan->layers[c->from - 1].channels;
    n->windows = value_of(t, c->from), n->kernels = t->parameters + c->weight;
    return c;
}

/* Whether a convolution is computed by the norm behind it. */
static int is_fused(const struct task *t, int64_t v) {
    const struct layer *next = t->plan->layers + v;
    struct norm n;
    return v < t->plan->count && next->kind == NORM && next->from == v && fuse(t, next, &n);
}

static void add_bias(const struct task *t, const struct layer *l, int64_t v, const REAL *bias, REAL *y) {
    if (l->bias < 0) return;
    for (int64_t p = 0; p < pixels_of(t, v); p++) add_to(y + p * l->channels, bias + l->bias, l->channels);
}

/* The gradient of a bias: the sum over pixels. */
static void sum_pixels(const struct task *t, const struct layer *l, int64_t v, const REAL *gy, REAL *g) {
    if (l->bias < 0) return;
    memset(g + l->bias, 0, l->channels * sizeof(REAL));
    for (int64_t p = 0; p < pixels_of(t, v); p++) add_to(g + l->bias, gy + p * l->channels, l->channels);
}

static void convolve(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    if (is_fused(t, v)) return;
    const struct factors images = {1, {f.x}, {t->parameters + l->weight}};
    tap_product(t->plan->taps + v - 1, images, f.y, 0, t->work, t->threads);
    add_bias(t, l, v, t->parameters, f.y);
}

static void convolve_tangents(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    const struct factors both = {f.x ? 2 : 1, {operand_of(t, l->from), f.x},
                                 {t->direction + l->weight, t->parameters + l->weight}};
    tap_product(t->plan->taps + v - 1, both, f.y, 0, t->work, t->threads);
    add_bias(t, l, v, t->direction, f.y);
}

static void convolve_backward(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    if (is_fused(t, v)) return;
    const struct taps *taps = t->plan->taps + v - 1;
    const struct factors by_kernel = {1, {operand_of(t, l->from)}, {b.gy}}, by_image = {1, {b.gy}, {t->kernels}};
    tap_weight_gradient(taps, by_kernel, b.parameters + l->weight, 0, t->threads);
    sum_pixels(t, l, v, b.gy, b.parameters);
    if (!b.gx) return;
    transpose_kernels(&taps->geometry, t->parameters + l->weight, t->kernels);
    tap_input_gradient(taps, by_image, b.gx, b.add, t->work, t->threads);
}

static void convolve_changes(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    const struct taps *taps = t->plan->taps + v - 1;
    const REAL *gy = gradient_of(t, v), *dx = b.gx ? tangent_of(t, l->from) : NULL;
    REAL *turned = t->kernels + t->plan->kernel;
    const struct factors by_kernel = {b.gx ? 2 : 1, {operand_of(t, l->from), dx}, {b.gy, gy}};
    const struct factors by_image = {2, {b.gy, gy}, {t->kernels, turned}};
    tap_weight_gradient(taps, by_kernel, b.parameters + l->weight, 0, t->threads);
    sum_pixels(t, l, v, b.gy, b.parameters);
    if (!b.gx) return;
    transpose_kernels(&taps->geometry, t->parameters + l->weight, t->kernels);
    transpose_kernels(&taps->geometry, t->direction + l->weight, turned);
    tap_input_gradient(taps, by_image, b.gx, b.add, t->work, t->threads);
}

static void normalise(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    struct norm n = norm_of(t, l, v);
    fuse(t, l, &n);
    n.y = f.y;
    norm(&n, t->threads);
}

static void normalise_tangents(const struct task *t, const struct layer *l, int64_t v, struct forward f) {
    struct norm n = norm_of(t, l, v);
    n.gy = gradient_of(t, v), n.v = f.x, n.v_scale = t->direction + l->weight, n.v_shift = t->direction + l->bias;
    n.scale_gradient = extra_of(t, v) + 2 * l->channels, n.shift_gradient = n.scale_gradient + l->channels;
    n.ggy = f.y, n.hx = moved_of(t, v), n.h_scale = f.product + l->weight;
    norm_second(&n, t->threads);
}

static void normalise_backward(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    struct norm n = norm_of(t, l, v);
    REAL *g = b.parameters, *sums = extra_of(t, v) + 2 * l->channels;  /* kept for the product */
    n.gy = b.gy, n.gx = b.gx, n.g_scale = t->differs ? sums : g + l->weight;
    n.g_shift = t->differs ? sums + l->channels : g + l->bias;
    const struct layer *convolution = fuse(t, l, &n);
    if (convolution) {
        n.g_kernels = g + convolution->weight;
        memset(n.g_kernels, 0, n.depth * l->channels * sizeof(REAL));
    }
    norm_backward(&n, t->threads);
    if (!t->differs) return;
    memcpy(g + l->weight, n.g_scale, l->channels * sizeof(REAL));
    memcpy(g + l->bias, n.g_shift, l->channels * sizeof(REAL));
}

/* The gradient is linear in `gy`: its tangent is the gradient of the change, and what normalise_tangents has kept. */
static void normalise_changes(const struct task *t, const struct layer *l, int64_t v, struct backward b) {
    struct norm n = norm_of(t, l, v);
    n.gy = b.gy, n.gx = b.gx, n.g_scale = t->kernels, n.g_shift = b.parameters + l->bias;
    norm_backward(&n, t->threads);
    add_to(b.parameters + l->weight, t->kernels, l->channels);
    add_to(b.gx, moved_of(t, v), size_of(t, l->from));
}

/* The sweeps */

static const struct { forward_function *values, *tangents; backward_function *gradients, *changes; } KINDS[] = {
    [WINDOWS] = {gather_windows, NULL, NULL, NULL},  /* inputs have no derivatives */
    [CONVOLUTION] = {convolve, convolve_tangents, convolve_backward, convolve_changes},
    [NORM] = {normalise, normalise_tangents, normalise_backward, normalise_changes},
    [ACTIVATION] = {activate, activate_tangents, activate_backward, activate_changes},
    [POOL] = {pool, pool_tangents, pool_backward, pool_backward},
    [MEAN] = {mean, mean, mean_backward, mean_backward},
    [SUM] = {sum, sum, sum_backward, sum_backward},
};

static void forward(const struct task *t) {
    for (int64_t v = 1; v <= t->plan->count; v++) {
        const struct layer *l = t->plan->layers + v - 1;
        const REAL *other = l->kind == SUM ? value_of(t, l->other) : NULL;
        KINDS[l->kind].values(t, l, v, (struct forward){operand_of(t, l->from), other, value_of(t, v), NULL});
    }
}

/* The tangents of all values along the direction. */
static void forward_tangents(const struct task *t, REAL *product) {
    for (int64_t v = 1; v <= t->plan->count; v++) {
        const struct layer *l = t->plan->layers + v - 1;
        if (!KINDS[l->kind].tangents) continue;
        const REAL *dx = has_derivative(t->plan, l->from) ? tangent_of(t, l->from) : NULL;
        const REAL *other = l->kind == SUM ? tangent_of(t, l->other) : NULL;
        KINDS[l->kind].tangents(t, l, v, (struct forward){dx, other, tangent_of(t, v), product});
    }
}

/* From the gradient of the last value to those of all values, and of the parameters; or the same for their changes. */
static void backward(const struct task *t, REAL *parameters, const int changes) {
    char written[MAX_LAYERS + 1] = {0};
    for (int64_t v = t->plan->count; v > 0; v--) {
        const struct layer *l = t->plan->layers + v - 1;
        backward_function *compute = changes ? KINDS[l->kind].changes : KINDS[l->kind].gradients;
        if (!compute) continue;
        struct backward b = {.gy = changes ? change_of(t, v) : gradient_of(t, v), .parameters = parameters,
                             .add = written[l->from]};
        if (has_derivative(t->plan, l->from)) b.gx = changes ? change_of(t, l->from) : gradient_of(t, l->from);
        written[l->from] = 1;
        if (l->kind == SUM) {
            b.g_other = changes ? change_of(t, l->other) : gradient_of(t, l->other);
            b.add_other = written[l->other];  /* both may be one value */
            written[l->other] = 1;
        }
        compute(t, l, v, b);
    }
}

/* The loss */

/* The samples that count in the loss: their rows of a last value, and the number of its channels. */
struct counted { int64_t first, samples, channels, outputs; };

static struct counted counted_of(const struct task *t) {
    const struct plan *p = t->plan;
    return (struct counted){t->call->support_size, p->samples - t->call->support_size, p->layers[p->count - 1].channels,
                            t->call->outputs};
}

/* The cross-entropy of a sample. The probabilities take the place of `p`; the most probable class is returned. */
static int64_t cross_entropy(const REAL *z, int64_t ways, int64_t label, REAL *p, REAL *loss) {
    int64_t best = 0;
    REAL sum = 0;
    for (int64_t k = 1; k < ways; k++)
        if (z[k] > z[best] || (z[k] != z[k] && z[best] == z[best])) best = k;
    for (int64_t k = 0; k < ways; k++) sum += p[k] = exp(z[k] - z[best]);
    *loss += log(sum) - (z[label] - z[best]);
    for (int64_t k = 0; k < ways; k++) p[k] /= sum;
    return best;
}

/* Gives the loss and the score of a task, and puts the loss's gradient at the last value's. */
static void evaluate(const struct task *t, int64_t number) {
    const struct counted n = counted_of(t);
    const REAL *z = value_of(t, t->plan->count) + n.first * n.channels;
    REAL *g = gradient_of(t, t->plan->count), loss = 0, score = 0;
    memset(g, 0, (n.first + n.samples) * n.channels * sizeof(REAL));
    g += n.first * n.channels;
    for (int64_t s = 0; s < n.samples; s++, z += n.channels, g += n.channels) {
        if (t->labels) {
            score += cross_entropy(z, n.outputs, t->labels[s], g, &loss) == t->labels[s];
            g[t->labels[s]] -= 1;
            for (int64_t k = 0; k < n.outputs; k++) g[k] /= (REAL)n.samples;
        } else
            for (int64_t k = 0; k < n.outputs; k++) {
                REAL away = z[k] - t->targets[s * n.outputs + k];
                loss += away * away;
                g[k] = 2 * away / (REAL)(n.samples * n.outputs);
            }
    }
    t->call->loss[number] = loss / (REAL)(t->labels ? n.samples : n.samples * n.outputs);
    t->call->score[number] = t->labels ? score / (REAL)n.samples : t->call->loss[number];
}

/* The tangent of the loss's gradient, from that of the last value. */
static void evaluate_change(const struct task *t) {
    const struct counted n = counted_of(t);
    const REAL *g = gradient_of(t, t->plan->count) + n.first * n.channels;
    const REAL *dz = tangent_of(t, t->plan->count) + n.first * n.channels;
    REAL *change = change_of(t, t->plan->count);
    memset(change, 0, (n.first + n.samples) * n.channels * sizeof(REAL));
    change += n.first * n.channels;
    for (int64_t s = 0; s < n.samples; s++, g += n.channels, dz += n.channels, change += n.channels) {
        if (t->labels) {
            REAL mean = 0;
            for (int64_t k = 0; k < n.outputs; k++) {
                change[k] = g[k] + (k == t->labels[s] ? 1 / (REAL)n.samples : 0);  /* probability / samples */
                mean += change[k] * (REAL)n.samples * dz[k];
            }
            for (int64_t k = 0; k < n.outputs; k++) change[k] *= dz[k] - mean;
        } else
            for (int64_t k = 0; k < n.outputs; k++) change[k] = 2 * dz[k] / (REAL)(n.samples * n.outputs);
    }
}

/* Calls */

struct job { const struct plan *plan; const struct call *call; int64_t threads; };

/* Memory for a task. What no task uses waits here for the next one: there are as many as there were tasks at once. */
struct scratch { struct scratch *next; int64_t size; REAL *numbers; };

static struct scratch *unused = NULL;
static char unused_is_locked = 0;

/* A spinlock, without the library of C threads: it is held for two assignments, once for each task. */
static void lock_unused(void) {
    while (__atomic_test_and_set(&unused_is_locked, __ATOMIC_ACQUIRE)) {}
}

static void unlock_unused(void) { __atomic_clear(&unused_is_locked, __ATOMIC_RELEASE); }

static struct scratch *take_scratch(int64_t size) {
    lock_unused();
    struct scratch *s = unused;
    if (s) unused = s->next;
    unlock_unused();
    if (!s) s = calloc(1, sizeof *s);
    if (s && s->size < size) {
        free(s->numbers);
        s->size = size;
        s->numbers = aligned_alloc(4096, (size * sizeof(REAL) + 4095) / 4096 * 4096);
    }
    if (!s || !s->numbers) {
        fprintf(stderr, "the compiled network: there is no memory for %lld numbers\n", (long long)size);
        abort();
    }
    return s;
}

static void give_back(struct scratch *s) {
    lock_unused();
    s->next = unused;
    unused = s;
    unlock_unused();
}

static struct task task_of(const struct job *j, int64_t number, REAL *scratch) {
    const struct plan *p = j->plan;
    const struct call *c = j->call;
    const int alone = !c->gradient && !c->product && !c->kept, differs = c->kept && !c->result;
    const int64_t counted = p->samples - c->support_size;
    REAL *kept = c->kept ? c->kept + number * (differs ? p->kept : p->values) : scratch;
    return (struct task){
        .plan = p, .call = c, .parameters = c->parameters + number * c->parameters_step,
        .x = c->x + number * p->samples * p->inputs,
        .direction = c->direction ? c->direction + number * p->parameters : NULL,
        .labels = c->labels ? c->labels + number * counted : NULL,
        .targets = c->targets ? c->targets + number * counted * c->outputs : NULL,
        .kept = kept, .gradients = (differs ? kept : scratch) + p->values, .scratch = scratch + p->kept,
        .kernels = scratch + p->kernels, .work = scratch + (alone ? p->work_alone : p->work), .threads = j->threads,
        .alone = alone, .differs = differs,
    };
}

static void loss_unit(const void *job, int64_t number) {
    const struct job *j = job;
    struct scratch *scratch = take_scratch(j->call->gradient ? j->plan->scratch : j->plan->alone);
    const struct task t = task_of(j, number, scratch->numbers);
    forward(&t);
    evaluate(&t, number);
    if (j->call->gradient) {
        REAL *gradient = j->call->gradient + number * j->plan->parameters;
        const REAL rate = -j->call->rate;
        backward(&t, gradient, 0);
        if (j->call->steps)
            for (int64_t i = 0; i < j->plan->parameters; i++) gradient[i] = t.parameters[i] + rate * gradient[i];
    }
    give_back(scratch);
}

static void product_unit(const void *job, int64_t number) {
    const struct job *j = job;
    const int64_t count = j->plan->parameters;
    struct scratch *scratch = take_scratch(j->plan->scratch + count);
    struct task t = task_of(j, number, scratch->numbers);
    const REAL *direction = t.direction, rate = -j->call->rate;
    REAL *product = j->call->product + number * count;
    if (j->call->steps) {
        REAL *scaled = scratch->numbers + j->plan->scratch;
        for (int64_t i = 0; i < count; i++) scaled[i] = rate * direction[i];
        t.direction = scaled;
    }
    forward_tangents(&t, product);
    evaluate_change(&t);
    backward(&t, product, 1);
    if (j->call->steps) for (int64_t i = 0; i < count; i++) product[i] += direction[i];
    give_back(scratch);
}

/* The numbers of the last value that count. */
static int64_t result_size(const struct task *t) {
    const struct layer *last = t->plan->layers + t->plan->count - 1;
    return (t->plan->samples - t->call->support_size) * last->height * last->width * last->channels;
}

static void outputs_unit(const void *job, int64_t number) {
    const struct job *j = job;
    struct scratch *scratch = take_scratch(j->call->kept ? j->plan->scratch : j->plan->alone);
    const struct task t = task_of(j, number, scratch->numbers);
    const int64_t last = j->plan->count, counted = result_size(&t), skipped = j->plan->places[last].size - counted;
    forward(&t);
    memcpy(j->call->result + number * counted, value_of(&t, last) + skipped, counted * sizeof(REAL));
    give_back(scratch);
}

static void outputs_gradient_unit(const void *job, int64_t number) {
    const struct job *j = job;
    struct scratch *scratch = take_scratch(j->plan->scratch);
    const struct task t = task_of(j, number, scratch->numbers);
    const int64_t last = j->plan->count, counted = result_size(&t), skipped = j->plan->places[last].size - counted;
    REAL *slope = gradient_of(&t, last);
    memset(slope, 0, skipped * sizeof(REAL));
    memcpy(slope + skipped, j->call->result + number * counted, counted * sizeof(REAL));
    backward(&t, j->call->gradient + number * j->plan->parameters, 0);
    give_back(scratch);
}

/* Tasks on threads; or, if there are fewer tasks, one after the other, each on all threads. */
static void for_each_task(const struct plan *plan, const struct call *call, int64_t threads, unit_body body) {
    const int inside = threads > call->tasks;
    const struct job j = {plan, call, inside ? threads : 1};
    for_each_unit(call->tasks, inside ? 1 : threads, body, &j);
}

void network_loss(const struct plan *plan, const struct call *call, int64_t threads) {
    for_each_task(plan, call, threads, loss_unit);
}

void network_product(const struct plan *plan, const struct call *call, int64_t threads) {
    for_each_task(plan, call, threads, product_unit);
}

void network_outputs(const struct plan *plan, const struct call *call, int64_t threads) {
    for_each_task(plan, call, threads, outputs_unit);
}

void network_outputs_gradient(const struct plan *plan, const struct call *call, int64_t threads) {
    for_each_task(plan, call, threads, outputs_gradient_unit);
}

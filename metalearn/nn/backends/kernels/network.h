/* A whole network: its outputs, its loss, gradient and Hessian-vector product, for one task after the other. */

#ifndef NETWORK_H
#define NETWORK_H

#include "kernels.h"

/* WINDOWS gathers the pixels of images [channel][row][column] that a kernel sees. CONVOLUTION has a bias if its `bias`
 * is not negative. SUM adds the values `from` and `other`. */
enum kind { WINDOWS, CONVOLUTION, NORM, ACTIVATION, POOL, MEAN, SUM };
enum activation { LEAKY, SOFTPLUS, TANH };

/* A layer reads the value `from`, and gives the value after its own number: layer 0 reads the inputs, value 0, and
 * gives value 1. `channels` is a multiple of LANES; only the first `used` of them are not zero. `weight` and `bias` are
 * places in a task's parameters: kernels [row][column][input][output], the scales and shifts of a norm. */
struct layer {
    int64_t kind, from, other, height, width, channels, used, kernel, stride, padding, weight, bias, activation;
    double slope, epsilon;
};

/* What is computed. `gradient` and `kept` may be NULL. The first `support_size` samples of a task only give the
 * statistics of norms, and do not count in its loss; 0: all samples do both. With labels, the loss is the mean
 * cross-entropy over the first `outputs` channels of the last value, and the score the accuracy. With targets, the loss
 * is the mean squared error, and so is the score. With `steps`, a step of `rate` against the gradient is taken
 * at once: `gradient` gets the parameters after it, and `product` the derivative of the step along `direction`.
 * `result` has the last value of the samples that count, for the functions that say so. */
struct call {
    int64_t tasks, support_size, outputs, parameters_step, steps;
    double rate;
    const REAL *parameters, *x;
    const int64_t *labels;
    const REAL *targets, *direction;
    REAL *loss, *score, *gradient, *kept, *product, *result;
};

struct plan;

/* A network's plan for tasks of `samples` samples, whose inputs have `input` = {channels, height, width}; NULL if it
 * cannot be computed. It is never changed afterwards, and `free_plan` ends it. */
struct plan *new_plan(const struct layer *layers, int64_t count, const int64_t *input, int64_t parameters,
                      int64_t samples);
void free_plan(struct plan *plan);

/* How many numbers the gradient keeps of a task for the product, and the outputs for their gradient. */
int64_t kept_size(const struct plan *plan);
int64_t values_size(const struct plan *plan);

/* The losses of all tasks, and their gradients, if `gradient` is not NULL. */
void network_loss(const struct plan *plan, const struct call *call, int64_t threads);

/* The products of each task's Hessian with its `direction`, from what its gradient has kept. */
void network_product(const struct plan *plan, const struct call *call, int64_t threads);

/* Gives the last values of all tasks as `result`; no loss is computed. `kept` may be NULL. */
void network_outputs(const struct plan *plan, const struct call *call, int64_t threads);

/* From the gradients `result` of the last values to those of the parameters, from what the outputs have kept. */
void network_outputs_gradient(const struct plan *plan, const struct call *call, int64_t threads);

#endif

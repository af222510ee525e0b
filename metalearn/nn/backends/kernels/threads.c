/* Units of work on threads. The threads are those of torch's OpenMP: a second OpenMP would compete with it for the
 * cores. */

#include <stddef.h>

#include "kernels.h"

int64_t lanes(void) { return LANES; }

typedef void (*parallel_region)(void (*body)(void *), void *state, unsigned threads, unsigned flags);
static parallel_region run_in_parallel = NULL;

void use_parallel_region(parallel_region region) { run_in_parallel = region; }

/* Threads take the next unit when they are ready, since units differ in length. Which thread computes a unit changes no
 * bit. */
struct share { unit_body body; const void *job; int64_t units, next; };

static void work_off(void *state) {
    struct share *s = state;
    for (;;) {
        int64_t unit = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (unit >= s->units) return;
        s->body(s->job, unit);
    }
}

void for_each_unit(int64_t units, int64_t threads, unit_body body, const void *job) {
    struct share s = {body, job, units, 0};
    if (threads > units) threads = units;
    if (threads > 1 && run_in_parallel) run_in_parallel(work_off, &s, (unsigned)threads, 0);
    else work_off(&s);
}

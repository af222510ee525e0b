/* Draws tasks as numpy does: the same numbers, without the microseconds that each of its calls takes.
 *
 * numpy.random.default_rng((root, split, index)), and of it choice(classes, ways, replace=False), integers(0, 4, ways)
 * and permutation(size) for each class. SeedSequence is O'Neill's seed_seq, the generator PCG64 (XSL-RR, O'Neill 2014),
 * and bounded numbers are Lemire's (arXiv 1805.10941). episodes.py compares with numpy before it trusts this. */

#include <stdint.h>
#include <stdlib.h>

typedef unsigned __int128 wide;

struct generator { wide state, step; uint32_t half; int has_half; };

/* SeedSequence, with a pool of four words */

enum { POOL = 4, WORDS = 6 };

static uint32_t hashed(uint32_t value, uint32_t *constant, uint32_t factor) {
    value ^= *constant;
    *constant *= factor;
    value *= *constant;
    return value ^ value >> 16;
}

static uint32_t mixed(uint32_t x, uint32_t y) {
    uint32_t result = 0xca01f9ddu * x - 0x4973f715u * y;
    return result ^ result >> 16;
}

static int words_of(uint64_t number, uint32_t *words) {
    words[0] = (uint32_t)number;
    words[1] = (uint32_t)(number >> 32);
    return words[1] ? 2 : 1;
}

static void seeded(uint64_t root, uint64_t split, uint64_t index, uint64_t *state) {
    uint32_t entropy[WORDS], pool[POOL], constant = 0x43b0d7e5u, words[2 * POOL];
    int count = words_of(root, entropy);
    count += words_of(split, entropy + count);
    count += words_of(index, entropy + count);
    for (int i = 0; i < POOL; i++) pool[i] = hashed(i < count ? entropy[i] : 0, &constant, 0x931e8875u);
    for (int from = 0; from < POOL; from++)
        for (int to = 0; to < POOL; to++)
            if (from != to) pool[to] = mixed(pool[to], hashed(pool[from], &constant, 0x931e8875u));
    for (int from = POOL; from < count; from++)
        for (int to = 0; to < POOL; to++) pool[to] = mixed(pool[to], hashed(entropy[from], &constant, 0x931e8875u));
    constant = 0x8b51f9ddu;
    for (int i = 0; i < 2 * POOL; i++) words[i] = hashed(pool[i % POOL], &constant, 0x58f38dedu);
    for (int i = 0; i < POOL; i++) state[i] = words[2 * i] | (uint64_t)words[2 * i + 1] << 32;
}

/* PCG64 */

static uint64_t next64(struct generator *g) {
    g->state = g->state * ((wide)2549297995355413924u << 64 | 4865540595714422341u) + g->step;
    uint64_t folded = (uint64_t)(g->state >> 64) ^ (uint64_t)g->state;
    unsigned turn = (unsigned)(g->state >> 122);
    return folded >> turn | folded << (-turn & 63);
}

static uint32_t next32(struct generator *g) {
    if (g->has_half) {
        g->has_half = 0;
        return g->half;
    }
    uint64_t both = next64(g);
    g->half = (uint32_t)(both >> 32), g->has_half = 1;
    return (uint32_t)both;
}

static struct generator generator_of(uint64_t root, uint64_t split, uint64_t index) {
    uint64_t s[POOL];
    seeded(root, split, index, s);
    struct generator g = {0, ((wide)s[2] << 64 | s[3]) << 1 | 1, 0, 0};
    next64(&g);
    g.state += (wide)s[0] << 64 | s[1];
    next64(&g);
    return g;
}

/* A number from 0 to `most`, which is below 2³² − 1. */
static uint32_t bounded(struct generator *g, uint32_t most) {
    if (!most) return 0;
    const uint32_t count = most + 1;
    uint64_t product = (uint64_t)next32(g) * count;
    if ((uint32_t)product < count) {
        const uint32_t threshold = (UINT32_MAX - most) % count;
        while ((uint32_t)product < threshold) product = (uint64_t)next32(g) * count;
    }
    return (uint32_t)(product >> 32);
}

/* The same by rejection of masked numbers: numpy has both, and permutation() takes this one. */
static uint32_t masked(struct generator *g, uint32_t most) {
    uint32_t mask = most, value;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    do value = next32(g) & mask;
    while (value > most);
    return value;
}

typedef uint32_t draw(struct generator *g, uint32_t most);

static void shuffle(struct generator *g, draw *drawn, int64_t count, int64_t *numbers) {
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = drawn(g, (uint32_t)i), kept = numbers[j];
        numbers[j] = numbers[i];
        numbers[i] = kept;
    }
}

/* Floyd's algorithm, and a shuffle of what it gives. */
static void choose(struct generator *g, int64_t classes, int64_t ways, int64_t *chosen) {
    for (int64_t last = classes - ways, i = 0; last < classes; last++, i++) {
        chosen[i] = bounded(g, (uint32_t)last);
        for (int64_t before = 0; before < i; before++)
            if (chosen[before] == chosen[i]) {
                chosen[i] = last;
                break;
            }
    }
    shuffle(g, bounded, ways, chosen);
}

/* Draws the tasks with these numbers: for each class its quarter turns, then the numbers of its pictures, `result`
 * [count][ways][1 + per_class]. Class c has sizes[c] pictures, whose numbers begin at firsts[c]; `largest` is the most
 * of them. Returns 0, or 1 if there is no memory. */
int64_t draw_tasks(int64_t count, const int64_t *indices, uint64_t root, uint64_t split, int64_t classes, int64_t ways,
                   int64_t per_class, int64_t turning, const int64_t *sizes, const int64_t *firsts, int64_t largest,
                   int64_t *result) {
    int64_t *chosen = malloc((size_t)(2 * ways + largest) * sizeof *chosen);
    if (!chosen) return 1;
    int64_t *turns = chosen + ways, *pictures = turns + ways;
    for (int64_t task = 0; task < count; task++) {
        struct generator g = generator_of(root, split, (uint64_t)indices[task]);
        choose(&g, classes, ways, chosen);
        for (int64_t way = 0; way < ways; way++) turns[way] = turning ? bounded(&g, 3) : 0;
        for (int64_t way = 0; way < ways; way++) {
            const int64_t class = chosen[way];
            for (int64_t i = 0; i < sizes[class]; i++) pictures[i] = i;
            shuffle(&g, masked, sizes[class], pictures);
            *result++ = turns[way];
            for (int64_t i = 0; i < per_class; i++) *result++ = firsts[class] + pictures[i];
        }
    }
    free(chosen);
    return 0;
}

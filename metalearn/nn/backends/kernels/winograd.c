/* Winograd's minimal filtering F(2×2, 3×3) (Lavin and Gray 2015, arXiv 1509.09308, section 4.1): a tile of 2×2 pixels of
 * the result takes 16 multiplications in place of 36. The 16 products of a tile are 16 matrix products over many. */

#include <stdlib.h>

#include "winograd.h"

enum { PLACES = 16, FEW_CHANNELS = 32 };

/* Numbers of a block of transformed tiles, inputs and outputs; and the fewest tiles that share transformed kernels. */
enum { TILE_NUMBERS = 1 << 18, FEW_TILES = 96 };

int winograd_fits(const struct geometry *g) {
    return g->kernel_height == 3 && g->kernel_width == 3 && g->stride == 1 && g->padding == 1 &&
           g->inputs % LANES == 0 && g->inputs >= FEW_CHANNELS && g->outputs >= FEW_CHANNELS;
}

static int64_t tiles_of(const struct geometry *g) {
    return g->samples * ((g->height + 1) / 2) * ((g->width + 1) / 2);
}

/* How many tiles are computed together. */
static int64_t block_of(const struct geometry *g) {
    int64_t block = TILE_NUMBERS / PLACES / (g->inputs + g->outputs), tiles = tiles_of(g);
    if (block < FEW_TILES) block = FEW_TILES;
    return block < tiles ? block : tiles;
}

int64_t winograd_scratch(const struct geometry *g) {
    int64_t wider = g->inputs > g->outputs ? g->inputs : g->outputs;
    return PLACES * (2 * g->inputs * g->outputs + 3 * block_of(g) * wider);
}

/* G g Gᵀ of every pair of channels: kernels [tap][pair] → [place][pair]. */
static void transform_kernels(const REAL *kernels, int64_t pairs, int turned, REAL *to) {
    for (int64_t i = 0; i < pairs; i += LANES) {
        vector g[3][3], rows[4][3];
        EACH(tap, 9) g[tap / 3][tap % 3] = load(kernels + (turned ? 8 - tap : tap) * pairs + i);
        EACH(c, 3) {
            vector outer = g[0][c] + g[2][c];
            rows[0][c] = g[0][c], rows[3][c] = g[2][c];
            rows[1][c] = (REAL)0.5 * (outer + g[1][c]);
            rows[2][c] = (REAL)0.5 * (outer - g[1][c]);
        }
        EACH(r, 4) {
            vector outer = rows[r][0] + rows[r][2];
            store(to + (4 * r + 0) * pairs + i, rows[r][0]);
            store(to + (4 * r + 1) * pairs + i, (REAL)0.5 * (outer + rows[r][1]));
            store(to + (4 * r + 2) * pairs + i, (REAL)0.5 * (outer - rows[r][1]));
            store(to + (4 * r + 3) * pairs + i, rows[r][2]);
        }
    }
}

/* A tile: its image, and its first row and column there. */
struct tile { int64_t sample, row, column; };

INLINE struct tile tile_of(const struct geometry *g, int64_t number) {
    int64_t down = (g->height + 1) / 2, right = (g->width + 1) / 2;
    return (struct tile){number / right / down, number / right % down * 2, number % right * 2};
}

INLINE int inside(const struct geometry *g, int64_t row, int64_t column) {
    return row >= 0 && row < g->height && column >= 0 && column < g->width;
}

/* Bᵀ d B of the 4×4 pixels around a tile; two places are `step` apart. */
static void transform_tile(const struct geometry *g, const REAL *x, int64_t channels, struct tile t, REAL *to,
                           int64_t step) {
    const REAL *image = x + t.sample * g->height * g->width * channels;
    for (int64_t c = 0; c < channels; c += LANES) {
        vector d[4][4], rows[4][4];
        EACH(p, 16) {
            int64_t row = t.row + p / 4 - 1, column = t.column + p % 4 - 1;
            d[p / 4][p % 4] = (vector){0};
            if (inside(g, row, column)) d[p / 4][p % 4] = load(image + (row * g->width + column) * channels + c);
        }
        EACH(k, 4) {
            rows[0][k] = d[0][k] - d[2][k];
            rows[1][k] = d[1][k] + d[2][k];
            rows[2][k] = d[2][k] - d[1][k];
            rows[3][k] = d[1][k] - d[3][k];
        }
        EACH(r, 4) {
            store(to + (4 * r + 0) * step + c, rows[r][0] - rows[r][2]);
            store(to + (4 * r + 1) * step + c, rows[r][1] + rows[r][2]);
            store(to + (4 * r + 2) * step + c, rows[r][2] - rows[r][1]);
            store(to + (4 * r + 3) * step + c, rows[r][1] - rows[r][3]);
        }
    }
}

/* Aᵀ m A of the 16 places of a tile: its 2×2 pixels. */
static void finish_tile(const struct geometry *g, const REAL *m, int64_t step, int64_t channels, struct tile t,
                        REAL *result, int add) {
    REAL *image = result + t.sample * g->height * g->width * channels;
    for (int64_t c = 0; c < channels; c += LANES) {
        vector rows[2][4];
        EACH(k, 4) {
            vector first = load(m + k * step + c), second = load(m + (4 + k) * step + c);
            vector third = load(m + (8 + k) * step + c), fourth = load(m + (12 + k) * step + c);
            rows[0][k] = first + second + third;
            rows[1][k] = second - third - fourth;
        }
        EACH(r, 2) {
            vector pixels[2] = {rows[r][0] + rows[r][1] + rows[r][2], rows[r][1] - rows[r][2] - rows[r][3]};
            EACH(k, 2)
                if (inside(g, t.row + r, t.column + k)) {
                    REAL *to = image + ((t.row + r) * g->width + t.column + k) * channels + c;
                    if (add) pixels[k] += load(to);
                    store(to, pixels[k]);
                }
        }
    }
}

/* A block of tiles: the first one, their number, and the memory of kernels, inputs and sums in transformed form. */
struct block {
    const struct geometry *g;
    const struct factors *f;
    int64_t depth, width, room, first, count;
    int turned, add;
    REAL *kernels, *inputs, *sums, *result;
};

static void kernels_unit(const void *job, int64_t source) {
    const struct block *b = job;
    int64_t pairs = b->depth * b->width;
    transform_kernels(b->f->right[source], pairs, b->turned, b->kernels + source * PLACES * pairs);
}

/* Tiles of a unit. */
enum { UNIT_TILES = 16 };

INLINE int64_t unit_end(const struct block *b, int64_t unit) {
    return (unit + 1) * UNIT_TILES < b->count ? (unit + 1) * UNIT_TILES : b->count;
}

static void tiles_unit(const void *job, int64_t unit) {
    const struct block *b = job;
    const int64_t step = b->room * b->depth;
    for (int s = 0; s < b->f->sources; s++)
        for (int64_t i = unit * UNIT_TILES; i < unit_end(b, unit); i++)
            transform_tile(b->g, b->f->left[s], b->depth, tile_of(b->g, b->first + i),
                           b->inputs + s * PLACES * step + i * b->depth, step);
}

static void place_unit(const void *job, int64_t place) {
    const struct block *b = job;
    struct factors f = {.sources = b->f->sources};
    for (int s = 0; s < f.sources; s++) {
        f.left[s] = b->inputs + (s * PLACES + place) * b->room * b->depth;
        f.right[s] = b->kernels + (s * PLACES + place) * b->depth * b->width;
    }
    multiply(b->count, b->depth, b->width, f, b->sums + place * b->room * b->width);
}

static void finish_unit(const void *job, int64_t unit) {
    const struct block *b = job;
    for (int64_t i = unit * UNIT_TILES; i < unit_end(b, unit); i++)
        finish_tile(b->g, b->sums + i * b->width, b->room * b->width, b->width, tile_of(b->g, b->first + i), b->result,
                    b->add);
}

void winograd(const struct geometry *g, struct factors f, int64_t depth, int64_t width, int turned, REAL *result,
              int add, REAL *scratch, int64_t threads) {
    const int64_t room = block_of(g), tiles = tiles_of(g);
    struct block b = {.g = g, .f = &f, .depth = depth, .width = width, .room = room, .turned = turned, .add = add,
                      .kernels = scratch, .inputs = scratch + 2 * PLACES * depth * width, .result = result};
    b.sums = b.inputs + 2 * PLACES * room * depth;
    for_each_unit(f.sources, threads, kernels_unit, &b);
    for (b.first = 0; b.first < tiles; b.first += room) {
        b.count = tiles - b.first < room ? tiles - b.first : room;
        const int64_t units = (b.count + UNIT_TILES - 1) / UNIT_TILES;
        for_each_unit(units, threads, tiles_unit, &b);
        for_each_unit(PLACES, threads, place_unit, &b);
        for_each_unit(units, threads, finish_unit, &b);
    }
}

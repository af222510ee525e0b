/* Convolution as in convolution.c, in bfloat16 by AMX tiles: operands are rounded to nearest even, their products are
 * summed in float32, and the sums stay float32. Numbers of channels are multiples of EDGE.
 *
 * Images are rounded once, and get margins of zeros. They are arranged so that windows of neighbouring pixels are
 * neighbours in memory; tiles are loaded from there. A sum runs over all taps and channels before it leaves its tile.
 */

#ifdef __linux__
#define _GNU_SOURCE
#endif

#include "kernels.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t brain;  /* a bfloat16 */

/* A tile has EDGE rows: of DEPTH operands, or of EDGE sums. In a right operand, two rows of numbers share one row of a
 * tile, pair by pair. A panel has two tiles for every step, side by side, or one if only one is left. */
enum { EDGE = 16, DEPTH = 32, TILE = EDGE * DEPTH, PANEL = 2 * EDGE, ROW_BYTES = 64 };

/* Pixels of a group of samples. With so many, most tiles are full, and the packed group fits the second-level cache. */
enum { GROUP_PIXELS = 256 };

enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };  /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */

int64_t tiles_there(void) { return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0; }

static const struct { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } SHAPES = {
    .palette = 1,
    .row_bytes = {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES},
    .rows = {EDGE, EDGE, EDGE, EDGE, EDGE, EDGE, EDGE, EDGE},
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t upwards(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

static void *room(int64_t bytes) { return aligned_alloc(ROW_BYTES, upwards(bytes, ROW_BYTES)); }

INLINE __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* Pairs of numbers: one of the first half, one of the second half. */
INLINE __m512i paired(__m512i halves) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

/* Transposes 16 × 16 numbers: loads bring quarters of rows together, then numbers are exchanged within. */
INLINE void transpose_rows(const float *const row[EDGE], int64_t at, __m512 column[EDGE]) {
    EACH(quarter, 4) {
        __m512 part[4];
        EACH(i, 4) {
            int64_t from = at + 4 * quarter;
            part[i] = _mm512_castps128_ps512(_mm_loadu_ps(row[i] + from));
            part[i] = _mm512_mask_broadcast_f32x4(part[i], 0x00f0, _mm_loadu_ps(row[i + 4] + from));
            part[i] = _mm512_mask_broadcast_f32x4(part[i], 0x0f00, _mm_loadu_ps(row[i + 8] + from));
            part[i] = _mm512_mask_broadcast_f32x4(part[i], 0xf000, _mm_loadu_ps(row[i + 12] + from));
        }
        __m512d a = (__m512d)_mm512_unpacklo_ps(part[0], part[1]), b = (__m512d)_mm512_unpacklo_ps(part[2], part[3]);
        __m512d c = (__m512d)_mm512_unpackhi_ps(part[0], part[1]), d = (__m512d)_mm512_unpackhi_ps(part[2], part[3]);
        column[4 * quarter] = (__m512)_mm512_unpacklo_pd(a, b);
        column[4 * quarter + 1] = (__m512)_mm512_unpackhi_pd(a, b);
        column[4 * quarter + 2] = (__m512)_mm512_unpacklo_pd(c, d);
        column[4 * quarter + 3] = (__m512)_mm512_unpackhi_pd(c, d);
    }
}

/* Packs half of a tile of a right operand: EDGE rows of numbers, or with `columns` EDGE columns. */
INLINE void pack_half(const float *const row[EDGE], int64_t at, const int columns, brain *to) {
    __m512 packed[EDGE];
    if (columns) transpose_rows(row, at, packed);
    else EACH(r, EDGE) packed[r] = _mm512_loadu_ps(row[r] + at);
    EACH(pair, EDGE / 2) _mm512_store_si512(to + pair * DEPTH, paired(rounded(packed[2 * pair], packed[2 * pair + 1])));
}

/* How many tiles side by side a panel has, if it begins at column `first` of `count`. */
INLINE int64_t tiles_at(int64_t first, int64_t count) { return least(2, (count - first) / EDGE); }

/* The sums are `rows` × `columns` of the tiles 0 to 3. */
INLINE void no_sums(const int rows, const int columns) {
    _tile_zero(0);
    if (columns > 1) _tile_zero(1);
    if (rows > 1) _tile_zero(2);
    if (rows > 1 && columns > 1) _tile_zero(3);
}

INLINE void load_sums(const int rows, const int columns, const float *sums, int64_t width) {
    _tile_loadd(0, sums, width * sizeof(float));
    if (columns > 1) _tile_loadd(1, sums + EDGE, width * sizeof(float));
    if (rows > 1) _tile_loadd(2, sums + EDGE * width, width * sizeof(float));
    if (rows > 1 && columns > 1) _tile_loadd(3, sums + EDGE * width + EDGE, width * sizeof(float));
}

/* One step: tiles of a, whose rows are a_row bytes apart, times tiles of a panel of b. */
INLINE void add_products(const int rows, const int columns, const brain *a, const brain *a_next, int64_t a_row,
                         const brain *b) {
    _tile_loadd(4, a, a_row);
    _tile_stream_loadd(6, b, ROW_BYTES);
    if (rows > 1) _tile_loadd(5, a_next, a_row);
    if (columns > 1) _tile_stream_loadd(7, b + TILE, ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    if (rows > 1) _tile_dpbf16ps(2, 5, 6);
    if (columns > 1) _tile_dpbf16ps(1, 4, 7);
    if (rows > 1 && columns > 1) _tile_dpbf16ps(3, 5, 7);
}

INLINE void store_sums(const int rows, const int columns, float *sums, int64_t width) {
    _tile_stored(0, sums, width * sizeof(float));
    if (columns > 1) _tile_stored(1, sums + EDGE, width * sizeof(float));
    if (rows > 1) _tile_stored(2, sums + EDGE * width, width * sizeof(float));
    if (rows > 1 && columns > 1) _tile_stored(3, sums + EDGE * width + EDGE, width * sizeof(float));
}

/* Calls TILES(rows, columns) with constants, so that the compiler knows both numbers. */
#define WITH_TILES(rows, columns, TILES)                                                                            \
    if (rows > 1 && columns > 1) TILES(2, 2);                                                                       \
    else if (rows > 1) TILES(2, 1);                                                                                 \
    else if (columns > 1) TILES(1, 2);                                                                              \
    else TILES(1, 1);

/* Images in bfloat16, with margins of zeros so wide that no window leaves them. A pixel has `depth` numbers: its
 * channels, then zeros. If windows are `apart` pixels apart, a plane has every apart-th row and column: there, windows
 * of neighbouring pixels are neighbours. A plane holds all samples. */
struct images { int64_t height, width, channels, depth, top, left, apart, plane_height, plane_width, samples; };

INLINE int64_t image_size(const struct images *i) { return i->height * i->width * i->channels; }
INLINE int64_t plane_size(const struct images *i) { return i->plane_height * i->plane_width * i->depth; }
INLINE int64_t images_size(const struct images *i) {  /* with room for a tile that begins in the last pixel */
    return i->apart * i->apart * i->samples * plane_size(i) + EDGE * i->depth;
}

/* The offset of a pixel of the first sample; row and column count from the margin. */
INLINE int64_t pixel_at(const struct images *i, int64_t y, int64_t x) {
    int64_t plane = y % i->apart * i->apart + x % i->apart;
    return plane * i->samples * plane_size(i) + (y / i->apart * i->plane_width + x / i->apart) * i->depth;
}

INLINE void round_pixel(const struct images *i, const float *from, brain *to) {
    for (int64_t k = 0; k + DEPTH <= i->channels; k += DEPTH)
        _mm512_storeu_si512(to + k, rounded(_mm512_loadu_ps(from + k), _mm512_loadu_ps(from + k + EDGE)));
    if (i->channels < i->depth)
        _mm512_storeu_si512(to + i->channels - EDGE,
                            rounded(_mm512_loadu_ps(from + i->channels - EDGE), _mm512_setzero_ps()));
}

/* Rounds the pixels of a row of a plane. */
static void round_row(const struct images *i, const float *from, int64_t column, brain *to) {
    for (int64_t x = 0; x < i->plane_width; x++, column += i->apart, to += i->depth)
        if (from && column >= 0 && column < i->width) round_pixel(i, from + column * i->channels, to);
        else
            for (int64_t k = 0; k < i->depth; k += DEPTH) _mm512_storeu_si512(to + k, _mm512_setzero_si512());
}

static void round_image(const struct images *i, const float *from, brain *to) {
    for (int64_t y = 0; y < i->plane_height * i->apart; y++)
        for (int64_t x = 0; x < i->apart; x++) {
            int64_t row = y - i->top;
            const float *pixels = row >= 0 && row < i->height ? from + row * i->width * i->channels : NULL;
            round_row(i, pixels, x - i->left, to + pixel_at(i, y, x));
        }
}

/* EDGE neighbouring pixels of the images: where they begin, and the result pixels of their windows, or -1. */
struct tile { int32_t in, out[EDGE]; };

/* Pixels of a result whose sums run over the same taps. In a product these are all pixels; in an input gradient, those
 * at the same place between strides. shift[t] is the offset from the begin of a window to the pixel of tap[t];
 * `kernels` is the offset of their kernels in a packed set. */
struct class { int64_t tiles, taps, steps, kernels; int32_t *tap, *shift; struct tile *tile; };

/* A product of `source` and kernels, or with `backward` an input gradient. A packed set of kernels has kernel_size. */
struct rows_job {
    const struct geometry *g;
    struct images in;
    int64_t backward, out_height, out_width, out_channels, groups, classes, kernel_size, weight_step;
    struct class *class;
    const float *source, *weight;
    brain *kernels;
    float *result;
};

/* Whether the k-th row or column of a kernel joins the first pixel of a class to one of the source, and to which. */
INLINE int joins(const struct rows_job *j, int64_t first, int64_t k, int64_t *at) {
    int64_t back = first + j->g->padding - k;
    *at = j->backward ? back / j->g->stride : first - j->g->padding + k;
    return !j->backward || back % j->g->stride == 0;
}

static void find_taps(const struct rows_job *j, int64_t y, int64_t x, struct class *c) {
    int64_t row, column;
    for (int64_t tap = 0; tap < tap_count(j->g); tap++)
        if (joins(j, y, tap / j->g->kernel_width, &row) && joins(j, x, tap % j->g->kernel_width, &column)) {
            c->tap[c->taps] = (int32_t)tap;
            c->shift[c->taps++] = (int32_t)pixel_at(&j->in, row + j->in.top, column + j->in.left);
        }
    c->steps = c->taps * j->in.depth / DEPTH;
}

static void find_tiles(const struct rows_job *j, int64_t y, int64_t x, struct class *c) {
    int64_t out_step = j->backward ? j->g->stride : 1, begin = -EDGE;
    struct tile *tile = c->tile - 1;
    for (int64_t sample = 0; sample < j->in.samples; sample++)
        for (int64_t row = 0; y + row * out_step < j->out_height; row++)
            for (int64_t column = 0; x + column * out_step < j->out_width; column++) {
                int64_t at = (sample * j->in.plane_height + row) * j->in.plane_width + column;
                int64_t out_row = sample * j->out_height + y + row * out_step;
                if (at >= begin + EDGE) {
                    begin = at;
                    (++tile)->in = (int32_t)(at * j->in.depth);
                    for (int r = 0; r < EDGE; r++) tile->out[r] = -1;
                }
                tile->out[at - begin] = (int32_t)(out_row * j->out_width + x + column * out_step);
            }
    c->tiles = tile + 1 - c->tile;
}

static void make_classes(struct rows_job *j) {
    int64_t stride = j->backward ? j->g->stride : 1, classes = stride * stride, taps = tap_count(j->g);
    int64_t pixels = j->in.samples * j->out_height * j->out_width;
    j->class = malloc(classes * (sizeof(struct class) + 2 * taps * sizeof(int32_t)) + pixels * sizeof(struct tile));
    int32_t *tap = (int32_t *)(j->class + classes);
    struct tile *tile = (struct tile *)(tap + 2 * classes * taps);
    for (j->classes = 0; j->classes < classes; j->classes++, tap += 2 * taps) {
        struct class *c = j->class + j->classes;
        *c = (struct class){.kernels = j->kernel_size, .tap = tap, .shift = tap + taps, .tile = tile};
        find_taps(j, j->classes / stride, j->classes % stride, c);
        find_tiles(j, j->classes / stride, j->classes % stride, c);
        tile += c->tiles;
        j->kernel_size += c->steps * DEPTH * j->out_channels;
    }
}

/* Packs the kernel of the t-th tap of all classes; it is read in memory order. */
static void pack_kernel(const struct rows_job *j, int64_t t, const float *weight, brain *to) {
    int64_t channels = j->in.channels, width = j->out_channels;
    const struct class *c = j->class;
    for (; t >= c->taps; c++) t -= c->taps;
    const float *kernel = weight + c->tap[t] * channels * width;
    to += c->kernels;
    int64_t rows = j->backward ? width : channels, columns = j->backward ? channels : width;
    for (int64_t row = 0; row < rows; row += EDGE) {
        const float *from[EDGE];
        EACH(r, EDGE) from[r] = kernel + (row + r) * columns;
        for (int64_t column = 0; column < columns; column += EDGE) {
            int64_t k = j->backward ? column : row, n = j->backward ? row : column, first = n / PANEL * PANEL;
            int64_t depth = t * j->in.depth + k, tile = depth / DEPTH * tiles_at(first, width) + (n - first) / EDGE;
            brain *half = to + first * c->steps * DEPTH + tile * TILE + depth % DEPTH * EDGE;
            if (j->backward) pack_half(from, column, 1, half);
            else pack_half(from, column, 0, half);
            if (k + EDGE == channels && channels < j->in.depth) memset(half + TILE / 2, 0, TILE / 2 * sizeof(brain));
        }
    }
}

/* The sums of the windows of a tile, and with two `rows` of the next tile. */
INLINE void multiply_windows(const int rows, const int columns, const struct rows_job *j, const struct class *c,
                             const struct tile *tile, const brain *images, const brain *kernels, float *sums) {
    int64_t depth = j->in.depth;
    no_sums(rows, columns);
    for (int64_t t = 0; t < c->taps; t++) {
        const brain *a = images + c->shift[t] + tile->in, *a_next = images + c->shift[t] + tile[rows - 1].in;
        for (int64_t k = 0; k < depth; k += DEPTH, kernels += columns * TILE)
            add_products(rows, columns, a + k, a_next + k, depth * sizeof(brain), kernels);
    }
    store_sums(rows, columns, sums, j->out_channels);
}

/* Convolves one or two tiles of pixels. The result has `pixels` pixels. */
static void convolve_tiles(const struct rows_job *j, const struct class *c, const struct tile *tile,
                           const brain *images, const brain *kernels, float *sums, int64_t pixels, float *result) {
    int64_t width = j->out_channels, rows = least(2, c->tile + c->tiles - tile);
    for (int64_t column = 0; column < width; column += PANEL) {
        int64_t columns = tiles_at(column, width);
        const brain *panel = kernels + column * c->steps * DEPTH;
#define TILES(R, C) multiply_windows(R, C, j, c, tile, images, panel, sums + column)
        WITH_TILES(rows, columns, TILES)
#undef TILES
    }
    for (int64_t r = 0; r < rows * EDGE; r++, sums += width) {
        int64_t out = tile[r / EDGE].out[r % EDGE];
        if (out >= 0 && out < pixels)
            for (int64_t k = 0; k < width; k += EDGE)
                _mm512_storeu_ps(result + out * width + k, _mm512_load_ps(sums + k));
    }
}

static void pack_unit(const void *job, int64_t unit) {
    const struct rows_job *j = job;
    int64_t taps = tap_count(j->g), set = unit / taps;
    pack_kernel(j, unit % taps, j->weight + set * j->weight_step, j->kernels + set * j->kernel_size);
}

/* Convolves a group of samples of a task; `images` and `sums` are work space. */
static void convolve_group(const struct rows_job *j, int64_t task, int64_t group, const brain *kernels, brain *images,
                           float *sums) {
    int64_t first = group * j->in.samples, samples = least(j->in.samples, j->g->samples - first);
    int64_t sample = task * j->g->samples + first, image = j->out_height * j->out_width, pixels = samples * image;
    float *result = j->result + sample * image * j->out_channels;
    for (int64_t s = 0; s < samples; s++)
        round_image(&j->in, j->source + (sample + s) * image_size(&j->in), images + s * plane_size(&j->in));
    __asm__ volatile("" ::: "memory");  /* the compiler does not know what tiles are loaded from */
    for (const struct class *c = j->class; c < j->class + j->classes; c++)
        for (const struct tile *tile = c->tile; tile < c->tile + c->tiles && tile->out[0] < pixels; tile += 2)
            convolve_tiles(j, c, tile, images, kernels + c->kernels, sums, pixels, result);
}

/* One group of samples; its kernels are packed already. */
static void group_unit(const void *job, int64_t unit) {
    const struct rows_job *j = job;
    int64_t task = unit / j->groups;
    brain *images = room(images_size(&j->in) * sizeof(brain));
    float *sums = room(PANEL * j->out_channels * sizeof(float));
    _tile_loadconfig(&SHAPES);
    convolve_group(j, task, unit % j->groups, j->kernels + (j->weight_step ? task * j->kernel_size : 0), images, sums);
    _tile_release();
    free(images);
    free(sums);
}

/* One task; its kernels are packed just before their use. */
static void task_unit(const void *job, int64_t task) {
    const struct rows_job *j = job;
    brain *images = room(images_size(&j->in) * sizeof(brain)), *kernels = room(j->kernel_size * sizeof(brain));
    float *sums = room(PANEL * j->out_channels * sizeof(float));
    for (int64_t t = 0; t < tap_count(j->g); t++) pack_kernel(j, t, j->weight + task * j->weight_step, kernels);
    _tile_loadconfig(&SHAPES);
    for (int64_t group = 0; group < j->groups; group++) convolve_group(j, task, group, kernels, images, sums);
    _tile_release();
    free(images);
    free(kernels);
    free(sums);
}

/* Divides the samples into groups of about GROUP_PIXELS pixels, but at least `at_least`; returns their number. */
static int64_t groups_of(int64_t samples, int64_t pixels, int64_t at_least, struct images *in) {
    int64_t fit = most(1, GROUP_PIXELS / pixels), groups = least(samples, most((samples + fit - 1) / fit, at_least));
    in->samples = (samples + groups - 1) / groups;
    return (samples + in->samples - 1) / in->samples;
}

static void convolve(struct rows_job j, int64_t threads) {
    int64_t sets = j.weight_step ? j.g->tasks : 1;
    int64_t pixels = j.out_height * j.out_width / (j.backward ? j.g->stride * j.g->stride : 1);
    j.groups = groups_of(j.g->samples, most(pixels, 1), threads > j.g->tasks ? threads : 1, &j.in);
    make_classes(&j);
    if (sets == j.g->tasks && threads <= sets) for_each_unit(sets, threads, task_unit, &j);
    else {
        j.kernels = room(sets * j.kernel_size * sizeof(brain));
        for_each_unit(sets * tap_count(j.g), threads, pack_unit, &j);
        for_each_unit(j.g->tasks * j.groups, threads, group_unit, &j);
        free(j.kernels);
    }
    free(j.class);
}

static struct images padded_images(const struct geometry *g, int64_t apart) {
    int64_t height = (g->out_height - 1) * g->stride + g->kernel_height;
    int64_t width = (g->out_width - 1) * g->stride + g->kernel_width;
    return (struct images){g->height, g->width, g->inputs, upwards(g->inputs, DEPTH), g->padding, g->padding, apart,
                           (height + apart - 1) / apart, (width + apart - 1) / apart, g->samples};
}

/* y = x ∗ w; weight_step is 0 if all tasks share one kernel. */
void tiles_product(const struct geometry *g, const float *x, const float *weight, int64_t weight_step, float *y,
                   int64_t threads) {
    convolve((struct rows_job){.g = g, .in = padded_images(g, g->stride), .out_height = g->out_height,
                               .out_width = g->out_width, .out_channels = g->outputs, .weight_step = weight_step,
                               .source = x, .weight = weight, .result = y}, threads);
}

/* The derivative of ⟨gy, x ∗ w⟩ by x. */
void tiles_input_gradient(const struct geometry *g, const float *gy, const float *weight, int64_t weight_step,
                          float *gx, int64_t threads) {
    int64_t top = most(0, g->kernel_height - 1 - g->padding) / g->stride;
    int64_t left = most(0, g->kernel_width - 1 - g->padding) / g->stride;
    struct images in = {g->out_height, g->out_width, g->outputs, upwards(g->outputs, DEPTH), top, left, 1,
                        top + (g->height - 1 + g->padding) / g->stride + 1,
                        left + (g->width - 1 + g->padding) / g->stride + 1, 0};
    convolve((struct rows_job){.g = g, .in = in, .backward = 1, .out_height = g->height, .out_width = g->width,
                               .out_channels = g->inputs, .weight_step = weight_step, .source = gy, .weight = weight,
                               .result = gx}, threads);
}

/* A weight gradient: for every tap, the transposed images times gy. Groups of samples are added in order, whatever the
 * number of threads. Both operands run over all `steps` × DEPTH places of a plane; if no window begins at a place, gy
 * is zero there. A channel of the images has `length` places, an odd multiple of DEPTH: so channels use all sets of a
 * cache. */
struct weights_job {
    const struct geometry *g;
    struct images in;
    int64_t groups, length, steps;
    const float *x, *gy, *zeros;
    brain *packed;
    float *gw;
};

INLINE int64_t left_size(const struct weights_job *j) { return j->g->stride * j->g->stride * j->g->inputs * j->length; }
INLINE int64_t packed_size(const struct weights_job *j) { return left_size(j) + j->steps * DEPTH * j->g->outputs; }

struct place { int64_t sample, y, x; };

INLINE void advance(const struct images *i, struct place *p) {
    if (++p->x < i->plane_width) return;
    p->x = 0;
    if (++p->y < i->plane_height) return;
    p->y = 0;
    p->sample++;
}

/* Images of height × width pixels. A plane has every apart-th of their rows and columns, beginning with y and x. */
struct view { const float *from; int64_t samples, height, width, channels, apart, y, x; };

/* The pixels at the next DEPTH places of a plane, or zeros. */
static void find_pixels(const struct weights_job *j, const struct view *v, struct place *p, const float *pixel[DEPTH]) {
    for (int64_t r = 0; r < DEPTH; r++, advance(&j->in, p)) {
        int64_t y = p->y * v->apart + v->y, x = p->x * v->apart + v->x;
        int inside = y >= 0 && y < v->height && x >= 0 && x < v->width && p->sample < v->samples;
        pixel[r] = inside ? v->from + ((p->sample * v->height + y) * v->width + x) * v->channels : j->zeros;
    }
}

static void pack_images(const struct weights_job *j, const struct view *v, brain *to) {
    struct place place = {0};
    for (int64_t at = 0; at < j->length; at += DEPTH) {
        const float *pixel[DEPTH];
        find_pixels(j, v, &place, pixel);
        for (int64_t channel = 0; channel < v->channels; channel += EDGE) {
            __m512 low[EDGE], high[EDGE];
            transpose_rows(pixel, channel, low);
            transpose_rows(pixel + EDGE, channel, high);
            EACH(r, EDGE) _mm512_store_si512(to + (channel + r) * j->length + at, rounded(low[r], high[r]));
        }
    }
}

static void pack_results(const struct weights_job *j, const struct view *v, brain *to) {
    struct place place = {0};
    for (int64_t step = 0; step < j->steps; step++) {
        const float *pixel[DEPTH];
        find_pixels(j, v, &place, pixel);
        for (int64_t channel = 0; channel < v->channels; channel += EDGE) {
            int64_t first = channel / PANEL * PANEL;
            int64_t tile = step * tiles_at(first, v->channels) + (channel - first) / EDGE;
            brain *half = to + first * j->steps * DEPTH + tile * TILE;
            pack_half(pixel, channel, 0, half);
            pack_half(pixel + EDGE, channel, 0, half + TILE / 2);
        }
    }
}

/* Packs the images and gy of a group of samples of a task. */
static void pack_group(const struct weights_job *j, int64_t task, int64_t group, brain *to) {
    const struct geometry *g = j->g;
    int64_t first = group * j->in.samples, samples = least(j->in.samples, g->samples - first);
    const float *from = j->x + (task * g->samples + first) * image_size(&j->in);
    for (int64_t plane = 0; plane < g->stride * g->stride; plane++) {
        int64_t y = plane / g->stride - g->padding, x = plane % g->stride - g->padding;
        struct view view = {from, samples, g->height, g->width, g->inputs, g->stride, y, x};
        pack_images(j, &view, to + plane * g->inputs * j->length);
    }
    const float *gy = j->gy + (task * g->samples + first) * g->out_height * g->out_width * g->outputs;
    struct view view = {gy, samples, g->out_height, g->out_width, g->outputs, 1, 0, 0};
    pack_results(j, &view, to + left_size(j));
}

static void pack_group_unit(const void *job, int64_t unit) {
    const struct weights_job *j = job;
    pack_group(j, unit / j->groups, unit % j->groups, j->packed + unit * packed_size(j));
}

/* Adds the sums over a group to `rows` × `columns` tiles of gw; the first group sets them. */
INLINE void multiply_places(const int rows, const int columns, const struct weights_job *j, int first, const brain *a,
                            const brain *b, float *gw) {
    if (first) no_sums(rows, columns);
    else load_sums(rows, columns, gw, j->g->outputs);
    for (int64_t step = 0; step < j->steps; step++, a += DEPTH, b += columns * TILE)
        add_products(rows, columns, a, a + EDGE * j->length, j->length * sizeof(brain), b);
    store_sums(rows, columns, gw, j->g->outputs);
}

/* Adds a group to the kernel of a tap. */
static void add_group(const struct weights_job *j, int64_t task, int64_t tap, int first, const brain *packed) {
    int64_t inputs = j->g->inputs, outputs = j->g->outputs, stride = j->g->stride;
    int64_t y = tap / j->g->kernel_width, x = tap % j->g->kernel_width, plane = y % stride * stride + x % stride;
    const brain *left = packed + plane * inputs * j->length + y / stride * j->in.plane_width + x / stride;
    float *gw = j->gw + (task * tap_count(j->g) + tap) * inputs * outputs;
    for (int64_t i = 0; i < inputs; i += PANEL)
        for (int64_t o = 0; o < outputs; o += PANEL) {
            int64_t rows = tiles_at(i, inputs), columns = tiles_at(o, outputs);
            const brain *a = left + i * j->length, *b = packed + left_size(j) + o * j->steps * DEPTH;
#define TILES(R, C) multiply_places(R, C, j, first, a, b, gw + i * outputs + o)
            WITH_TILES(rows, columns, TILES)
#undef TILES
        }
}

/* All taps of one task; each group is packed just before its use. */
static void kernels_unit(const void *job, int64_t task) {
    const struct weights_job *j = job;
    brain *packed = room(packed_size(j) * sizeof(brain));
    _tile_loadconfig(&SHAPES);
    for (int64_t group = 0; group < j->groups; group++) {
        pack_group(j, task, group, packed);
        __asm__ volatile("" ::: "memory");  /* the compiler does not know what tiles are loaded from */
        for (int64_t tap = 0; tap < tap_count(j->g); tap++) add_group(j, task, tap, group == 0, packed);
    }
    _tile_release();
    free(packed);
}

/* One tap of a task; its groups are packed already. */
static void tap_unit(const void *job, int64_t unit) {
    const struct weights_job *j = job;
    int64_t task = unit / tap_count(j->g), tap = unit % tap_count(j->g);
    _tile_loadconfig(&SHAPES);
    for (int64_t group = 0; group < j->groups; group++)
        add_group(j, task, tap, group == 0, j->packed + (task * j->groups + group) * packed_size(j));
    _tile_release();
}

/* The derivative of ⟨gy, x ∗ w⟩ by w. */
void tiles_weight_gradient(const struct geometry *g, const float *gy, const float *x, float *gw, int64_t threads) {
    struct weights_job j = {.g = g, .in = padded_images(g, g->stride), .x = x, .gy = gy, .gw = gw};
    int64_t shift = (g->kernel_height - 1) / g->stride * j.in.plane_width + (g->kernel_width - 1) / g->stride;
    j.groups = groups_of(g->samples, g->out_height * g->out_width, 1, &j.in);
    j.steps = (j.in.samples * j.in.plane_height * j.in.plane_width + DEPTH - 1) / DEPTH;
    j.length = (((j.steps * DEPTH + shift + DEPTH - 1) / DEPTH) | 1) * DEPTH;
    float *zeros = calloc(most(g->inputs, g->outputs), sizeof(float));
    j.zeros = zeros;
    if (threads > g->tasks) {
        j.packed = room(g->tasks * j.groups * packed_size(&j) * sizeof(brain));
        for_each_unit(g->tasks * j.groups, threads, pack_group_unit, &j);
        for_each_unit(g->tasks * tap_count(g), threads, tap_unit, &j);
    } else
        for_each_unit(g->tasks, threads, kernels_unit, &j);
    free(j.packed);
    free(zeros);
}

#else

int64_t tiles_there(void) { return 0; }

#endif

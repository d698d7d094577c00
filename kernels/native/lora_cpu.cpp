// y += (x A^T) B by each row's adapter, on the CPU. The layout of A, B and the step: layer.py and step.py beside this.
//
// Two phases, each over the chunks of the step (rows of one adapter, which need not be neighbours): shrink leaves
// h = x A^T in scratch memory, expand adds h B to y, whose elements are read and rounded once. Every thread takes
// its part of each chunk. A chunk of few rows streams the weights once through AVX-512, h in float32; many rows are
// multiplied in blocks, by AMX where the CPU has it, weights packed on the way, h in bfloat16. Without AVX512-BF16
// only float32 is computed, by plain loops.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_BF16 1
#include <immintrin.h>
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

struct Chunk {
    int32_t first_row, rank, position, rows, affine, unused[3];
};

struct Step {
    const Chunk *chunks;
    const int32_t *rows;  // batch rows in the order of the chunks' positions
    int32_t count, threads, max_rank, total_rows;
};

struct Layer {
    const Step *step;
    const void *a;         // [arena rows, slices, in]
    const void *const *b;  // per slice [arena rows, width]
    const int64_t *widths;
    int64_t slices, in;
    int32_t kind, dtype;
};

namespace {

enum Kind { LINEAR, EMBEDDING_INT32, EMBEDDING_INT64 };
enum DType { FLOAT32, BFLOAT16 };

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Range {
    int64_t begin, end;
};

Range part_of(int64_t n, int64_t granule, int64_t part, int64_t parts) {
    int64_t step = round_up((n + parts - 1) / parts, granule);
    return {std::min(n, part * step), std::min(n, (part + 1) * step)};
}

// Memory that only grows, 64-byte aligned; what it held is lost.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    void *get(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = round_up(bytes, 1 << 16);
            data_ = std::aligned_alloc(64, size_);
            if (!data_) std::abort();
        }
        return data_;
    }

  private:
    void *data_ = nullptr;
    int64_t size_ = 0;
};

// One chunk over one layer. `h` is the chunk's scratch: [rows, rank * slices] float32, as A's rows lie.
template <class T> struct Work {
    const Layer &layer;
    const Chunk &chunk;
    const int32_t *rows;
    T *y;
    const void *x;
    int64_t y_stride, x_stride;
    float *h;

    int64_t columns() const { return chunk.rank * layer.slices; }
    // The rows after the adapter's own: its gain, then its shift; only with chunk.affine.
    const T *gain(int64_t slice) const { return b(slice) + chunk.rank * layer.widths[slice]; }
    T *y_row(int64_t i) const { return y + rows[i] * y_stride; }
    const T *x_row(int64_t i) const { return static_cast<const T *>(x) + rows[i] * x_stride; }
    float *h_row(int64_t i) const { return h + i * columns(); }
    const T *a() const { return static_cast<const T *>(layer.a) + chunk.first_row * layer.slices * layer.in; }
    const T *b(int64_t slice) const {
        return static_cast<const T *>(layer.b[slice]) + chunk.first_row * layer.widths[slice];
    }
    int64_t id(int64_t i) const {
        return layer.kind == EMBEDDING_INT32 ? static_cast<const int32_t *>(x)[rows[i] * x_stride]
                                             : static_cast<const int64_t *>(x)[rows[i] * x_stride];
    }
};

float to_float(float value) { return value; }

void shrink(const Work<float> &work, Range columns) {
    int64_t in = work.layer.in;
    for (int64_t column = columns.begin; column < columns.end; column++) {
        const float *a = work.a() + column * in;
        for (int64_t i = 0; i < work.chunk.rows; i++) {
            const float *x = work.x_row(i);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < in; k++) sum += x[k] * a[k];
            work.h_row(i)[column] = sum;
        }
    }
}

void expand(const Work<float> &work, int64_t slice, float *y_base, Range columns) {
    int64_t width = work.layer.widths[slice], slices = work.layer.slices;
    int64_t begin = columns.begin, end = columns.end;
    for (int64_t i = 0; i < work.chunk.rows; i++) {
        float *y = y_base + work.rows[i] * work.y_stride;
        for (int64_t k = 0; k < work.chunk.rank; k++) {
            const float h = work.h_row(i)[k * slices + slice], *b = work.b(slice) + k * width;
#pragma omp simd
            for (int64_t c = begin; c < end; c++) y[c] += h * b[c];
        }
    }
}

// y (1 + gain) + shift, once the product is in y.
void adjust(const Work<float> &work, int64_t slice, float *y_base, Range columns) {
    const float *gain = work.gain(slice), *shift = gain + work.layer.widths[slice];
    int64_t begin = columns.begin, end = columns.end;
    for (int64_t i = 0; i < work.chunk.rows; i++) {
        float *y = y_base + work.rows[i] * work.y_stride;
#pragma omp simd
        for (int64_t c = begin; c < end; c++) y[c] += y[c] * gain[c] + shift[c];
    }
}

#ifdef HAVE_BF16

using bf16 = uint16_t;

float to_float(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// The lanes of the first n elements, of 32.
__mmask32 first_lanes(int64_t n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << std::max<int64_t>(n, 0)) - 1; }

__m512i load(const bf16 *from, __mmask32 lanes) { return _mm512_maskz_loadu_epi16(lanes, from); }
__m512bh pairs(__m512i v) { return (__m512bh)v; }
__m512 even(__m512i v) { return (__m512)_mm512_slli_epi32(v, 16); }
__m512 odd(__m512i v) { return (__m512)_mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)); }

__m512i interleaved(__m512 even, __m512 odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// h of M rows and 4 columns from `first`; beyond the last column it is computed again and dropped.
template <int M> void shrink_block(const Work<bf16> &work, int64_t row, int64_t first, int64_t end) {
    int64_t in = work.layer.in;
    const bf16 *x[M], *a[4];
    for (int m = 0; m < M; m++) x[m] = work.x_row(row + m);
    for (int n = 0; n < 4; n++) a[n] = work.a() + std::min(first + n, end - 1) * in;
    __m512 sums[M][4];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 4; n++) sums[m][n] = _mm512_setzero_ps();
    for (int64_t k = 0; k < in; k += 32) {
        __mmask32 lanes = first_lanes(in - k);
        __m512bh xs[M];
        for (int m = 0; m < M; m++) xs[m] = pairs(load(x[m] + k, lanes));
        for (int n = 0; n < 4; n++) {
            __m512bh as = pairs(load(a[n] + k, lanes));
            _mm_prefetch(a[n] + k + 4 * in, _MM_HINT_T0);
            for (int m = 0; m < M; m++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], xs[m], as);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 4 && first + n < end; n++)
            work.h_row(row + m)[first + n] = _mm512_reduce_add_ps(sums[m][n]);
}

void shrink(const Work<bf16> &work, Range columns) {
    int64_t rows = work.chunk.rows;
    for (int64_t column = columns.begin; column < columns.end; column += 4) {
        int64_t i = 0;
        for (; i + 4 <= rows; i += 4) shrink_block<4>(work, i, column, columns.end);
        for (; i + 2 <= rows; i += 2) shrink_block<2>(work, i, column, columns.end);
        if (i < rows) shrink_block<1>(work, i, column, columns.end);
    }
}

// y of M rows and up to 32 * P columns.
template <int M, int P>
void expand_block(const Work<bf16> &work, int64_t slice, bf16 *y_base, int64_t row, int64_t begin, int64_t end) {
    int64_t width = work.layer.widths[slice], slices = work.layer.slices;
    bf16 *y[M];
    const float *h[M];
    __mmask32 lanes[P];
    __m512 evens[M][P], odds[M][P];
    for (int p = 0; p < P; p++) lanes[p] = first_lanes(end - begin - 32 * p);
    for (int m = 0; m < M; m++) {
        y[m] = y_base + work.rows[row + m] * work.y_stride + begin;
        h[m] = work.h_row(row + m) + slice;
        for (int p = 0; p < P; p++) {
            __m512i v = load(y[m] + 32 * p, lanes[p]);
            evens[m][p] = even(v), odds[m][p] = odd(v);
        }
    }
    const bf16 *b = work.b(slice) + begin;
    for (int64_t k = 0; k < work.chunk.rank; k++, b += width) {
        for (int p = 0; p < P; p++) {
            __m512i v = load(b + 32 * p, lanes[p]);
            _mm_prefetch(b + 32 * (p + P), _MM_HINT_T0);
            __m512 b_even = even(v), b_odd = odd(v);
            for (int m = 0; m < M; m++) {
                __m512 factor = _mm512_set1_ps(h[m][k * slices]);
                evens[m][p] = _mm512_fmadd_ps(factor, b_even, evens[m][p]);
                odds[m][p] = _mm512_fmadd_ps(factor, b_odd, odds[m][p]);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++)
            _mm512_mask_storeu_epi16(y[m] + 32 * p, lanes[p], interleaved(evens[m][p], odds[m][p]));
}

template <int M, int P>
void expand_rows(const Work<bf16> &work, int64_t slice, bf16 *y_base, int64_t row, Range columns) {
    for (int64_t c = columns.begin; c < columns.end; c += 32 * P)
        expand_block<M, P>(work, slice, y_base, row, c, columns.end);
}

void expand(const Work<bf16> &work, int64_t slice, bf16 *y_base, Range columns) {
    for (int64_t c = columns.begin; c < columns.end; c += 256) {
        Range block = {c, std::min(c + 256, columns.end)};
        int64_t i = 0, rows = work.chunk.rows;
        for (; i + 4 <= rows; i += 4) expand_rows<4, 2>(work, slice, y_base, i, block);
        for (; i + 2 <= rows; i += 2) expand_rows<2, 4>(work, slice, y_base, i, block);
        if (i < rows) expand_rows<1, 8>(work, slice, y_base, i, block);
    }
}

void adjust(const Work<bf16> &work, int64_t slice, bf16 *y_base, Range columns) {
    const bf16 *gains = work.gain(slice), *shifts = gains + work.layer.widths[slice];
    for (int64_t c = columns.begin; c < columns.end; c += 32) {
        const __mmask32 lanes = first_lanes(columns.end - c);
        const __m512i gain = load(gains + c, lanes), shift = load(shifts + c, lanes);
        for (int64_t i = 0; i < work.chunk.rows; i++) {
            bf16 *y = y_base + work.rows[i] * work.y_stride + c;
            const __m512i v = load(y, lanes);
            const __m512 evens = _mm512_fmadd_ps(even(v), even(gain), _mm512_add_ps(even(v), even(shift)));
            const __m512 odds = _mm512_fmadd_ps(odd(v), odd(gain), _mm512_add_ps(odd(v), odd(shift)));
            _mm512_mask_storeu_epi16(y, lanes, interleaved(evens, odds));
        }
    }
}

constexpr int64_t STRIPE = 256;   // columns of B that are packed together: they stay in the L1 cache up to rank 32
constexpr int64_t PANEL = 32;     // rows and columns of a block: 2 x 2 tiles of 16 x 16
constexpr int64_t TILE = 16 * 32; // elements of a tile of bfloat16

#ifdef HAVE_AMX

// Linux asks for this once in every process.
bool has_amx() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool enabled = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return enabled;
}

// Eight full tiles; afterwards the thread's tiles are configured as the caller had them.
class Tiles {
  public:
    Tiles() {
        if (!has_amx()) return;
        _tile_storeconfig(&before_);
        Config config = {};
        config.palette = 1;
        for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (has_amx()) _tile_loadconfig(&before_);
    }

  private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    Config before_;
};

// c [32, 32] = a [32, 32 * steps] times a packed panel.
void multiply_tiles(float *c, const bf16 *a, int64_t pitch, const bf16 *panel, int64_t steps) {
    // GCC 12 does not know that a tile load reads memory.
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, a += 32, panel += 2 * TILE) {
        _tile_loadd(4, a, pitch * 2);
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + TILE, 64);
        _tile_loadd(5, a + 16 * pitch, pitch * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, PANEL * 4);
    _tile_stored(1, c + 16, PANEL * 4);
    _tile_stored(2, c + 16 * PANEL, PANEL * 4);
    _tile_stored(3, c + 16 * PANEL + 16, PANEL * 4);
}

#else

constexpr bool has_amx() { return false; }
struct Tiles {
    ~Tiles() {}
};
void multiply_tiles(float *, const bf16 *, int64_t, const bf16 *, int64_t) {}

#endif

// Fewer rows are not worth packing the weights.
bool in_blocks(const Work<bf16> &work) {
    return work.layer.kind == LINEAR && work.chunk.rows >= (has_amx() ? 24 : 64);
}

// M rows of c, N of the panel's two tiles.
template <int M, int N>
void multiply_rows(float *c, const bf16 *a, int64_t pitch, const bf16 *panel, int64_t pairs_of_depth) {
    __m512 sums[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sums[m][n] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs_of_depth; k++) {
        const bf16 *row = panel + k / 16 * 2 * TILE + k % 16 * 32;
        for (int m = 0; m < M; m++) {
            int32_t factors;
            std::memcpy(&factors, a + m * pitch + 2 * k, 4);
            for (int n = 0; n < N; n++)
                sums[m][n] = _mm512_dpbf16_ps(sums[m][n], pairs(_mm512_set1_epi32(factors)),
                                              pairs(_mm512_load_si512(row + n * TILE)));
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) _mm512_store_ps(c + m * PANEL + n * 16, sums[m][n]);
}

// c [32, 32] = a [32, depth] times a packed panel; a's rows are `pitch` elements apart, and zero from depth to the
// next multiple of 32. Of c, only the first `rows` and the first `tiles` times 16 columns are wanted.
void multiply(float *c, const bf16 *a, int64_t pitch, const bf16 *panel, int64_t depth, int64_t rows, int64_t tiles) {
    if (has_amx()) return multiply_tiles(c, a, pitch, panel, (depth + 31) / 32);
    const int64_t live = std::min(rows, PANEL), pairs_of_depth = (depth + 1) / 2;
    for (int64_t i = 0; i < live && tiles > 1; i += 8)
        multiply_rows<8, 2>(c + i * PANEL, a + i * pitch, pitch, panel, pairs_of_depth);
    for (int64_t i = 0; i < live && tiles == 1; i += 16)
        multiply_rows<16, 1>(c + i * PANEL, a + i * pitch, pitch, panel, pairs_of_depth);
}

// Where h lies for blocks: bfloat16 [slices, rows up to 32s, rank up to 32s], zeros between. With 16 rows or more
// it takes no more memory than the float32 of `work.h`.
struct TiledH {
    bf16 *data;
    int64_t rank, rows, ranks;  // ranks: tiles of 16

    explicit TiledH(const Work<bf16> &work)
        : data(reinterpret_cast<bf16 *>(work.h)), rank(round_up(work.chunk.rank, 32)),
          rows(round_up(work.chunk.rows, PANEL)), ranks((work.chunk.rank + 15) / 16) {}
    bf16 *at(int64_t slice, int64_t row) const { return data + (slice * rows + row) * rank; }
};

// The tile of 16 of A's rows from `first_rank`, 32 of its columns from k: pairs of columns by row.
void pack_a(bf16 *tile, const Work<bf16> &work, int64_t slice, int64_t first_rank, int64_t k) {
    const int64_t in = work.layer.in, pitch = work.layer.slices * in;
    const int64_t live = std::min<int64_t>(16, work.chunk.rank - first_rank);
    const __mmask32 lanes = first_lanes(in - k);
    alignas(64) bf16 block[TILE];
    for (int64_t r = 0; r < 16; r++) {
        const bf16 *a = work.a() + (first_rank + std::min(r, live - 1)) * pitch + slice * in + k;
        _mm512_store_si512(block + 32 * r, load(a, r < live ? lanes : 0));
    }
    const __m512i rows = _mm512_set_epi32(240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 0);
    for (int pair = 0; pair < 16; pair++)
        _mm512_store_si512(tile + 32 * pair, _mm512_i32gather_epi32(rows, block + 2 * pair, 4));
}

// A of all slices, slice by slice in tiles of 16 ranks, two to a panel [steps, 2, tile].
void pack_a(bf16 *panels, const Work<bf16> &work, int64_t steps, const TiledH &h) {
    for (int64_t tile = 0; tile < work.layer.slices * h.ranks; tile++)
        for (int64_t step = 0; step < steps; step++)
            pack_a(panels + (tile / 2 * steps + step) * 2 * TILE + tile % 2 * TILE, work, tile / h.ranks,
                   tile % h.ranks * 16, step * 32);
}

// 32 columns of B as a panel [steps, 2, tile], the even ones and the odd ones: pairs of ranks by column.
void pack_b(bf16 *panel, const bf16 *b, int64_t width, int64_t columns, int64_t rank) {
    const __m512i high = _mm512_set1_epi32(0xffff0000);
    const __mmask32 lanes = first_lanes(columns);
    for (int64_t k = 0; k < round_up(rank, 32); k += 2) {
        const __m512i one = load(b + k * width, k < rank ? lanes : 0);
        const __m512i two = load(b + (k + 1) * width, k + 1 < rank ? lanes : 0);
        bf16 *row = panel + k / 32 * 2 * TILE + k % 32 / 2 * 32;
        _mm512_store_si512(row, _mm512_or_si512(_mm512_andnot_si512(high, one), _mm512_slli_epi32(two, 16)));
        _mm512_store_si512(row + TILE, _mm512_or_si512(_mm512_srli_epi32(one, 16), _mm512_and_si512(two, high)));
    }
}

struct Block {
    const bf16 *data;
    int64_t pitch;
};

// 32 of the chunk's rows of x: where they lie, or copied, with zeros beyond the last row and column.
Block rows_of_x(bf16 *copy, const Work<bf16> &work, int64_t row, int64_t pitch) {
    const int64_t live = std::min(PANEL, work.chunk.rows - row), in = work.layer.in;
    const int32_t *rows = work.rows + row;
    if (live == PANEL && in == pitch && rows[PANEL - 1] - rows[0] == PANEL - 1) return {work.x_row(row), work.x_stride};
    for (int64_t i = 0; i < PANEL; i++)
        for (int64_t k = 0; k < pitch; k += 32) {
            const bf16 *x = work.x_row(row + std::min(i, live - 1)) + k;
            _mm512_store_si512(copy + i * pitch + k, load(x, i < live ? first_lanes(in - k) : 0));
        }
    return {copy, pitch};
}

// A panel's product into h: its halves are tiles of 16 ranks, of one slice or of two.
void store_h(const TiledH &h, const float *c, int64_t row, int64_t first_tile, int64_t tiles) {
    for (int64_t tile = first_tile; tile < std::min(first_tile + 2, tiles); tile++, c += 16)
        for (int64_t i = 0; i < PANEL; i++) {
            bf16 *to = h.at(tile / h.ranks, row + i) + tile % h.ranks * 16;
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(c + i * PANEL));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), rounded);
            if (h.ranks % 2 && tile % h.ranks == h.ranks - 1)
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 16), _mm256_setzero_si256());
        }
}

void shrink_blocks(const Work<bf16> &work, Range rows) {
    static thread_local Scratch scratch;
    const Tiles configured;
    const TiledH h(work);
    const int64_t steps = (work.layer.in + 31) / 32, tiles = work.layer.slices * h.ranks, panels = (tiles + 1) / 2;
    const int64_t pitch = steps * 32, x_size = PANEL * pitch, size = panels * steps * 2 * TILE;
    bf16 *copy = static_cast<bf16 *>(scratch.get((x_size + size) * sizeof(bf16))), *packed = copy + x_size;
    if (tiles % 2) std::memset(packed + size - steps * 2 * TILE, 0, steps * 2 * TILE * sizeof(bf16));
    pack_a(packed, work, steps, h);
    alignas(64) float c[PANEL * PANEL];
    for (int64_t row = rows.begin; row < rows.end; row += PANEL) {
        const Block x = rows_of_x(copy, work, row, pitch);
        for (int64_t panel = 0; panel < panels; panel++) {
            multiply(c, x.data, x.pitch, packed + panel * steps * 2 * TILE, work.layer.in, work.chunk.rows - row,
                     tiles - 2 * panel);
            store_h(h, c, row, panel * 2, tiles);
        }
    }
}

// y [rows, 32 columns] += c, whose rows hold the even columns and then the odd ones.
void add_block(const Work<bf16> &work, bf16 *y_base, int64_t row, int64_t columns, const float *c) {
    const __mmask32 lanes = first_lanes(columns);
    const int64_t rows = std::min(PANEL, work.chunk.rows - row);
    for (int64_t i = 0; i < rows; i++, c += PANEL) {
        bf16 *y = y_base + work.rows[row + i] * work.y_stride;
        _mm_prefetch(y + 2 * PANEL, _MM_HINT_T0);
        const __m512i v = load(y, lanes);
        const __m512 evens = _mm512_add_ps(even(v), _mm512_load_ps(c));
        const __m512 odds = _mm512_add_ps(odd(v), _mm512_load_ps(c + 16));
        _mm512_mask_storeu_epi16(y, lanes, interleaved(evens, odds));
    }
}

void expand_blocks(const Work<bf16> &work, int64_t slice, bf16 *y_base, Range columns) {
    static thread_local Scratch scratch;
    const Tiles configured;
    const TiledH h(work);
    const int64_t width = work.layer.widths[slice], steps = h.rank / 32, size = steps * 2 * TILE;
    bf16 *packed = static_cast<bf16 *>(scratch.get(STRIPE / PANEL * size * sizeof(bf16)));
    alignas(64) float c[PANEL * PANEL];
    for (int64_t begin = columns.begin; begin < columns.end; begin += STRIPE) {
        const int64_t end = std::min(begin + STRIPE, columns.end);
        for (int64_t k = begin; k < end; k += PANEL)
            pack_b(packed + (k - begin) / PANEL * size, work.b(slice) + k, width, end - k, work.chunk.rank);
        for (int64_t row = 0; row < work.chunk.rows; row += PANEL)
            for (int64_t k = begin; k < end; k += PANEL) {
                multiply(c, h.at(slice, row), h.rank, packed + (k - begin) / PANEL * size, work.chunk.rank,
                         work.chunk.rows - row, 2);
                add_block(work, y_base + k, row, end - k, c);
            }
    }
}

#endif

// The part of a thread.

void shrink_linear(const Work<float> &work, int64_t part, int64_t parts) {
    shrink(work, part_of(work.columns(), 1, part, parts));
}

void expand_slice(const Work<float> &work, int64_t slice, float *y, int64_t part, int64_t parts) {
    Range columns = part_of(work.layer.widths[slice], 64, part, parts);
    expand(work, slice, y, columns);
    if (work.chunk.affine) adjust(work, slice, y, columns);
}

#ifdef HAVE_BF16
void shrink_linear(const Work<bf16> &work, int64_t part, int64_t parts) {
    if (in_blocks(work)) return shrink_blocks(work, part_of(work.chunk.rows, PANEL, part, parts));
    shrink(work, part_of(work.columns(), 4, part, parts));
}

void expand_slice(const Work<bf16> &work, int64_t slice, bf16 *y, int64_t part, int64_t parts) {
    Range columns = part_of(work.layer.widths[slice], 64, part, parts);
    if (in_blocks(work))
        expand_blocks(work, slice, y, columns);
    else
        expand(work, slice, y, columns);
    if (work.chunk.affine) adjust(work, slice, y, columns);
}
#endif

template <class T> void shrink_embedding(const Work<T> &work, Range columns) {
    for (int64_t i = 0; i < work.chunk.rows; i++) {
        const int64_t id = work.id(i);
        const bool known = 0 <= id && id < work.layer.in;
        for (int64_t k = columns.begin; k < columns.end; k++)
            work.h_row(i)[k] = known ? to_float(work.a()[k * work.layer.in + id]) : 0;
    }
}

template <class T> void shrink_part(const Work<T> &work, int64_t part, int64_t parts) {
    if (work.layer.kind == LINEAR) return shrink_linear(work, part, parts);
    shrink_embedding(work, part_of(work.chunk.rank, 1, part, parts));
}

template <class T> void expand_part(const Work<T> &work, int64_t part, int64_t parts) {
    T *y = work.y;
    for (int64_t slice = 0; slice < work.layer.slices; y += work.layer.widths[slice++])
        expand_slice(work, slice, y, part, parts);
}

template <class T> void apply(const Layer &layer, T *y, const void *x, int64_t y_stride, int64_t x_stride) {
    const Step &step = *layer.step;
    static thread_local Scratch scratch;
    const int64_t pitch = round_up(step.max_rank, 32) * layer.slices, parts = step.threads;
    float *const h = static_cast<float *>(scratch.get(step.total_rows * pitch * sizeof(float)));
    auto work = [&](const Chunk &chunk) {
        return Work<T>{layer, chunk, step.rows + chunk.position, y, x, y_stride, x_stride, h + chunk.position * pitch};
    };
#pragma omp parallel num_threads(parts) if (parts > 1)
    {
#pragma omp for schedule(static, 1)
        for (int64_t task = 0; task < step.count * parts; task++)
            shrink_part(work(step.chunks[task / parts]), task % parts, parts);
#pragma omp for schedule(static, 1)
        for (int64_t task = 0; task < step.count * parts; task++)
            expand_part(work(step.chunks[task / parts]), task % parts, parts);
    }
}

}  // namespace

extern "C" {

// Bits: 1 float32, 2 bfloat16.
int lora_cpu_dtypes() {
#ifdef HAVE_BF16
    return 3;
#else
    return 1;
#endif
}

void lora_cpu_apply(const Layer *layer, void *y, const void *x, int64_t y_stride, int64_t x_stride) {
#ifdef HAVE_BF16
    if (layer->dtype == BFLOAT16) return apply(*layer, static_cast<bf16 *>(y), x, y_stride, x_stride);
#endif
    apply(*layer, static_cast<float *>(y), x, y_stride, x_stride);
}
}

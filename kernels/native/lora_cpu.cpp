// y += (x A^T) B by each row's adapter, on the CPU. The layout of A, B and the step: layer.py and step.py beside this.
//
// Two phases, each over the chunks of the step (rows of one adapter, which need not be neighbours): shrink leaves
// h = x A^T in scratch memory, expand adds h B to y, whose element is read and rounded once. Every thread takes its part of
// each chunk. A chunk of few rows streams the weights once through AVX-512; many rows are multiplied in AMX tiles,
// weights packed on the way. Without AVX512-BF16 only float32 is computed, by plain loops.

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
    int32_t first_row, rank, position, rows;
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
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
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

#endif

template <class T> void shrink_part(const Work<T> &work, int64_t part, int64_t parts) {
    Range columns = part_of(work.columns(), 4, part, parts);
    if (work.layer.kind == LINEAR) return shrink(work, columns);
    for (int64_t i = 0; i < work.chunk.rows; i++) {
        int64_t id = work.id(i);
        bool known = 0 <= id && id < work.layer.in;
        for (int64_t k = columns.begin; k < columns.end; k++)
            work.h_row(i)[k] = known ? to_float(work.a()[k * work.layer.in + id]) : 0;
    }
}

template <class T> void expand_part(const Work<T> &work, int64_t part, int64_t parts) {
    T *y = work.y;
    for (int64_t slice = 0; slice < work.layer.slices; y += work.layer.widths[slice++])
        expand(work, slice, y, part_of(work.layer.widths[slice], 256, part, parts));
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

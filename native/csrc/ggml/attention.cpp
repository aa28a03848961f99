// Attention on the CPU, for llama.cpp's graphs.
//
// For a query q and the cells that its row of the mask lets through, out = sum of exp(s_i - m) v_i / sum of exp(s_i - m)
// with s_i = scale q.k_i + mask_i and m the largest s_i.  The cells are taken in blocks.  Each block has its own largest
// score, sum and weighted values, and two such triples make one: scale both to the larger maximum and add (online softmax,
// arXiv:1805.02867; FlashAttention, arXiv:2205.14135).  So spans of one row can be computed by different threads and
// merged afterwards (Flash-Decoding).
//
// How it goes:
//   1. Each row of the mask becomes a bitmap, once for all heads; masked cells are not looked at again.
//   2. The query heads that share a head of the keys are computed together: a key or value is read and converted once.
//   3. Rows that see mostly the same cells, as those of one prompt do, are computed together as products of matrices.
//   4. Every other row, as those of decoding sequences are, is computed on its own.  Its cells are cut into spans whose
//      borders depend on the row alone, and merged in order: the bits of its result depend neither on the threads nor on
//      the other rows.
//   5. All arithmetic is in F32.
//
// A row that sees a cell whose score is not finite (NaN or an infinity) becomes NaN: weights are damaged, or F16
// overflowed, and the answer must not look like one.  The faults of a row's scores are added to its total, where they are
// NaN or nothing.  A cell that a row does not see changes no bit of that row.
//
// What it does not do goes to llama.cpp's own function, which is compiled under another name.
#include "attention_switch.h"
#include "ops.h"
#include "vector.h"

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <memory>
#include <new>

extern "C" void laneway_stock_flash_attn_ext(const ggml_compute_params *params, ggml_tensor *out);

#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#elif defined(__GNUC__)
#define UNROLLED _Pragma("GCC unroll 16")
#else
#define UNROLLED
#endif

namespace {

using laneway::Vector;

constexpr int most_heads = 16;     // computed together
constexpr int block = 64;          // cells between two looks at the largest score
constexpr int least_span = 64;     // cells that one thread takes at least
constexpr int most_spans = 64;     // of a row
constexpr int shares = 4;          // pieces of work a thread, at least, before rows are cut into spans
#if LANEWAY_AVX512 || LANEWAY_AVX2
constexpr int most_rows = std::numeric_limits<int>::max(); // of a sequence
#else
constexpr int most_rows = 32; // beyond, llama.cpp's tiles have code for more processors than this one
#endif
constexpr int most_queries = 64;   // rows times heads of a tile
constexpr int least_rows = 4;      // of a tile
constexpr size_t line = 64;        // bytes that threads should not share

size_t in_lines(size_t bytes) { return (bytes + line - 1) / line * line; }

int lowest_bit(uint64_t bits) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(bits);
#else
    int index = 0;
    for (; !(bits & 1); bits >>= 1) {
        ++index;
    }
    return index;
#endif
}

int bits_set(uint64_t bits) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_popcountll(bits);
#else
    int count = 0;
    for (; bits; bits &= bits - 1) {
        ++count;
    }
    return count;
#endif
}

// How the elements of a key or value become floats.  `at` is a multiple of the vector's width.
struct Floats {
    static Vector load(const char *row, int at) { return Vector::load(reinterpret_cast<const float *>(row) + at); }
};
struct Halves {
    static Vector load(const char *row, int at) { return Vector::halves(reinterpret_cast<const uint16_t *>(row) + at); }
};
// ggml's q8_0: 32 bytes after one half that they are multiplied by.
struct Bytes {
    static Vector load(const char *row, int at) {
        const char *group = row + at / 32 * 34;
        uint16_t scale;
        std::memcpy(&scale, group, sizeof scale);
        return Vector::bytes(reinterpret_cast<const int8_t *>(group + 2) + at % 32) *
               Vector::all(laneway::half_to_float(scale));
    }
};

// One operation: what its tensors say.
struct Shape {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    ggml_tensor *out;
    int size, rows, cells, heads, heads_kv, streams; // rows: of one stream
    int group, parts, together; // query heads of a key's head; in how many parts they are computed; heads of a part
    float scale, cap;
    float max_bias; // other than zero: ALiBi, arXiv:2108.12409

    explicit Shape(ggml_tensor *out)
        : q(out->src[0]), k(out->src[1]), v(out->src[2]), mask(out->src[3]), sinks(out->src[4]), out(out), size(static_cast<int>(q->ne[0])),
          rows(static_cast<int>(q->ne[1])), cells(static_cast<int>(k->ne[1])), heads(static_cast<int>(q->ne[2])),
          heads_kv(static_cast<int>(k->ne[2])), streams(static_cast<int>(q->ne[3])) {
        group = heads / heads_kv;
        parts = (group + most_heads - 1) / most_heads;
        together = (group + parts - 1) / parts;
        float parameters[3];
        std::memcpy(parameters, out->op_params, sizeof parameters);
        max_bias = parameters[1];
        cap = parameters[2];
        scale = cap != 0.0f ? parameters[0] / cap : parameters[0];
    }

    int tile_rows() const { return std::max(1, most_queries / together); }
    int all_rows() const { return rows * streams; }
    int items() const { return heads_kv * parts; } // of a row
    int words() const { return (cells + 63) / 64; }

    const uint16_t *mask_of(int row) const {
        if (!mask) {
            return nullptr;
        }
        const size_t at = static_cast<size_t>(row % rows) * mask->nb[1] + static_cast<size_t>(row / rows % mask->ne[3]) * mask->nb[3];
        return reinterpret_cast<const uint16_t *>(static_cast<const char *>(mask->data) + at);
    }

    // Of cell 0; K and V may have fewer streams than Q.
    const char *cells_of(const ggml_tensor *kv, int row, int head) const {
        const int stream = row / rows / static_cast<int>(q->ne[3] / kv->ne[3]);
        return static_cast<const char *>(kv->data) + static_cast<size_t>(head) * kv->nb[2] + static_cast<size_t>(stream) * kv->nb[3];
    }

    const float *query_of(int row, int head) const {
        const size_t at = static_cast<size_t>(row % rows) * q->nb[1] + static_cast<size_t>(head) * q->nb[2] +
                          static_cast<size_t>(row / rows) * q->nb[3];
        return reinterpret_cast<const float *>(static_cast<const char *>(q->data) + at);
    }

    // What values of the mask are multiplied by: with ALiBi a geometric series over the heads.  For a number of heads
    // that is no power of two, the heads beyond take every other item of the series of twice as many.
    float slope_of(int head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        int power = 1;
        while (2 * power <= heads) {
            power *= 2;
        }
        const float exponent = head < power ? static_cast<float>(head + 1) : static_cast<float>(head - power) + 0.5f;
        return std::exp2(-max_bias * exponent / static_cast<float>(power));
    }

    // A score that every row of a head has beside those of its cells, and no value to go with it.
    float sink_of(int head) const { return static_cast<const float *>(sinks->data)[head]; }

    float *result_of(int row, int head) const {
        const size_t at = (static_cast<size_t>(row) * static_cast<size_t>(heads) + static_cast<size_t>(head)) * out->nb[1];
        return reinterpret_cast<float *>(static_cast<char *>(out->data) + at);
    }
};

bool handles(const ggml_compute_params *params, const ggml_tensor *out) {
    const ggml_tensor *q = out->src[0], *k = out->src[1], *v = out->src[2], *mask = out->src[3], *sinks = out->src[4];
    const bool known = k->type == v->type &&
                       (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_F32 || k->type == GGML_TYPE_Q8_0);
    return known && laneway_ggml_attention_wanted() && !params->use_ref && q->ne[1] <= most_rows && (!sinks || sinks->type == GGML_TYPE_F32) &&
           q->type == GGML_TYPE_F32 && out->type == GGML_TYPE_F32 &&
           q->ne[0] % (k->type == GGML_TYPE_Q8_0 ? 32 : 16) == 0 && k->ne[0] == q->ne[0] && v->ne[0] == q->ne[0] &&
           v->ne[1] == k->ne[1] && k->ne[1] > 0 && k->ne[1] < INT32_MAX - 64 && v->ne[2] == k->ne[2] &&
           q->ne[2] % k->ne[2] == 0 && q->ne[3] % k->ne[3] == 0 && q->ne[3] % v->ne[3] == 0 &&
           q->nb[0] == sizeof(float) && k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type) &&
           out->nb[0] == sizeof(float) &&
           (!mask || (mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(uint16_t) && mask->ne[0] >= k->ne[1] &&
                      mask->ne[1] >= q->ne[1] && mask->ne[2] == 1 && q->ne[3] % mask->ne[3] == 0));
}

// The cells of a row that are not masked, one after the other.
class Cells {
public:
    Cells(const uint64_t *bitmap, int skipped) : word(bitmap), bits(*bitmap) {
        for (int here = bits_set(bits); skipped > 0 && here <= skipped; here = bits_set(bits)) {
            skipped -= here;
            step();
        }
        for (; skipped > 0; --skipped) {
            bits &= bits - 1;
        }
    }

    // There must be as many.
    void take(int32_t *cells, int count) {
        while (count > 0) {
            while (!bits) {
                step();
            }
            if (bits == ~uint64_t{0} && count >= 64) {
                for (int i = 0; i < 64; ++i) {
                    cells[i] = base + i;
                }
                cells += 64;
                count -= 64;
                bits = 0;
                continue;
            }
            for (; bits && count > 0; --count) {
                *cells++ = base + lowest_bit(bits);
                bits &= bits - 1;
            }
        }
    }

private:
    void step() {
        bits = *++word;
        base += 64;
    }

    const uint64_t *word;
    uint64_t bits;
    int32_t base = 0;
};

// What is known of some cells, for each of the heads that are computed together: the largest score, the sum of
// exp(score - largest) and the values weighted by that.
struct Sum {
    float *largest, *total, *values;

    static size_t floats(const Shape &shape) {
        return static_cast<size_t>(shape.together) * static_cast<size_t>(shape.size + 2);
    }
    Sum(const Shape &shape, float *memory)
        : largest(memory), total(memory + shape.together), values(memory + 2 * shape.together) {}
    Sum(float *largest, float *total, float *values) : largest(largest), total(total), values(values) {}
};

float exponential(float x) {
    float lanes[Vector::width];
    laneway::exponential(Vector::all(x)).store(lanes);
    return lanes[0];
}

void scale_values(float *values, int size, float factor) {
    const Vector by = Vector::all(factor);
    for (int i = 0; i < size; i += Vector::width) {
        (Vector::load(values + i) * by).store(values + i);
    }
}

// all = all + more
void merge(const Shape &shape, Sum &all, const Sum &more, int heads) {
    for (int head = 0; head < heads; ++head) {
        const float largest = std::max(all.largest[head], more.largest[head]);
        const float ours = exponential(all.largest[head] - largest), theirs = exponential(more.largest[head] - largest);
        all.largest[head] = largest;
        all.total[head] = all.total[head] * ours + more.total[head] * theirs;
        float *values = all.values + head * shape.size;
        const float *others = more.values + head * shape.size;
        const Vector by = Vector::all(ours), by_theirs = Vector::all(theirs);
        for (int i = 0; i < shape.size; i += Vector::width) {
            laneway::fused(Vector::load(values + i), by, Vector::load(others + i) * by_theirs).store(values + i);
        }
    }
}

void finish(const Shape &shape, const Sum &sum, int row, int first_head, int heads) {
    for (int head = 0; head < heads; ++head) {
        float *result = shape.result_of(row, first_head + head);
        const float *values = sum.values + head * shape.size;
        // A row that sees nothing is zero; one with a fault has a total of NaN.
        float factor = sum.total[head] == 0.0f ? 0.0f : 1.0f / sum.total[head];
        if (shape.sinks && factor != 0.0f) {
            const float sink = shape.sink_of(first_head + head), largest = std::max(sum.largest[head], sink);
            const float ours = exponential(sum.largest[head] - largest);
            factor = ours / (sum.total[head] * ours + exponential(sink - largest));
        }
        const Vector by = Vector::all(factor);
        for (int i = 0; i < shape.size; i += Vector::width) {
            (Vector::load(values + i) * by).store(result + i);
        }
    }
}

// A thread's own memory and the loops over cells.
class Worker {
public:
    static size_t floats(const Shape &shape) {
        const size_t together = static_cast<size_t>(shape.together), size = static_cast<size_t>(shape.size);
        return together * size + 16 * size + together * block + 2 * Sum::floats(shape);
    }

    Worker(const Shape &shape, float *memory)
        : shape(shape), queries(memory), keys(queries + shape.together * shape.size), weights(keys + 16 * shape.size),
          first(shape, weights + shape.together * block),
          second(shape, weights + shape.together * block + static_cast<ptrdiff_t>(Sum::floats(shape))) {}

    // One key's head and one row, or the part of its query heads that is computed together.
    void begin(int of_row, int item) {
        row = of_row;
        head_kv = item / shape.parts;
        const int part = item % shape.parts;
        first_head = head_kv * shape.group + part * shape.together;
        heads = std::min(shape.together, shape.group - part * shape.together);
        const Vector scale = Vector::all(shape.scale);
        for (int head = 0; head < heads; ++head) {
            const float *query = shape.query_of(row, first_head + head);
            for (int i = 0; i < shape.size; i += Vector::width) {
                (Vector::load(query + i) * scale).store(queries + head * shape.size + i);
            }
        }
        keys_at = shape.cells_of(shape.k, row, head_kv);
        values_at = shape.cells_of(shape.v, row, head_kv);
    }

    void span(Cells &cells, int count, bool biased, Sum &sum) {
        switch (shape.k->type) {
        case GGML_TYPE_F16:
            return span_of<Halves>(cells, count, biased, sum);
        case GGML_TYPE_F32:
            return span_of<Floats>(cells, count, biased, sum);
        default:
            return span_of<Bytes>(cells, count, biased, sum);
        }
    }

    // All spans, one after the other.
    void whole_row(const uint64_t *bitmap, int count, int span_cells, bool biased) {
        if (count == 0) {
            for (int head = 0; head < heads; ++head) {
                float *result = shape.result_of(row, first_head + head);
                std::fill(result, result + shape.size, 0.0f);
            }
            return;
        }
        Cells cells(bitmap, 0);
        span(cells, std::min(span_cells, count), biased, first);
        for (int done = span_cells; done < count; done += span_cells) {
            span(cells, std::min(span_cells, count - done), biased, second);
            merge(shape, first, second, heads);
        }
        finish(shape, first, row, first_head, heads);
    }

    // Spans that lie in memory one after the other.
    void merge_spans(const float *memory, int spans) {
        std::memcpy(first.largest, memory, Sum::floats(shape) * sizeof(float));
        for (int i = 1; i < spans; ++i) {
            merge(shape, first, Sum(shape, const_cast<float *>(memory) + static_cast<ptrdiff_t>(Sum::floats(shape)) * i), heads);
        }
        finish(shape, first, row, first_head, heads);
    }

private:
    template <typename Source> void span_of(Cells &cells, int count, bool biased, Sum &sum) {
        int32_t taken[block];
        for (int done = 0; done < count; done += block) {
            const int here = std::min(block, count - done);
            const int padded = (here + 15) / 16 * 16;
            cells.take(taken, here);
            std::fill(taken + here, taken + padded, taken[here - 1]);
            for (int i = 0; i < padded; i += 16) {
                score_16<Source>(taken + i, weights + i);
            }
            if (shape.cap != 0.0f) {
                soften(padded);
            }
            if (biased) {
                add_mask(taken, padded);
            }
            weigh(here, padded, done == 0, sum);
            int head = 0;
            for (; head + 4 <= heads; head += 4) {
                add_values<Source, 4>(taken, here, head, sum);
            }
            switch (heads - head) {
            case 3:
                add_values<Source, 3>(taken, here, head, sum);
                break;
            case 2:
                add_values<Source, 2>(taken, here, head, sum);
                break;
            case 1:
                add_values<Source, 1>(taken, here, head, sum);
                break;
            default:
                break;
            }
        }
    }

    // The scores of 16 cells, for all heads.
    template <typename Source> void score_16(const int32_t *cells, float *scores) {
        const int size = shape.size;
        for (int c = 0; c < 16; ++c) {
            const char *key = keys_at + static_cast<size_t>(cells[c]) * shape.k->nb[1];
            for (int i = 0; i < size; i += Vector::width) {
                Source::load(key, i).store(keys + c * size + i);
            }
        }
        for (int head = 0; head < heads; ++head) {
            const float *query = queries + head * size;
            for (int from = 0; from < 16; from += Vector::width) {
                Vector products[Vector::width];
                for (Vector &product : products) {
                    product = Vector::zero();
                }
                for (int i = 0; i < size; i += Vector::width) {
                    const Vector q = Vector::load(query + i);
                    const float *key = keys + from * size + i;
                    UNROLLED
                    for (int c = 0; c < Vector::width; ++c) {
                        products[c] = laneway::fused(q, Vector::load(key + c * size), products[c]);
                    }
                }
                laneway::sums(products).store(scores + head * block + from);
            }
        }
    }

    void soften(int count) {
        const Vector cap = Vector::all(shape.cap);
        for (int head = 0; head < heads; ++head) {
            for (int i = 0; i < count; i += Vector::width) {
                float *at = weights + head * block + i;
                const Vector score = Vector::load(at);
                // An infinite score would become the cap.
                laneway::fused(laneway::hyperbolic_tangent(score), cap, laneway::fault_of(score)).store(at);
            }
        }
    }

    void add_mask(const int32_t *cells, int count) {
        float values[block];
        const uint16_t *mask = shape.mask_of(row);
        for (int i = 0; i < count; ++i) {
            values[i] = laneway::half_to_float(mask[cells[i]]);
        }
        for (int head = 0; head < heads; ++head) {
            const Vector slope = Vector::all(shape.slope_of(first_head + head));
            for (int i = 0; i < count; i += Vector::width) {
                float *score = weights + head * block + i;
                laneway::fused(Vector::load(values + i), slope, Vector::load(score)).store(score);
            }
        }
    }

    // Scores become weights.
    void weigh(int count, int padded, bool is_first, Sum &sum) {
        for (int head = 0; head < heads; ++head) {
            float *scores = weights + head * block;
            Vector faults = Vector::zero();
            for (int i = 0; i < padded; i += Vector::width) {
                faults = faults + laneway::fault_of(Vector::load(scores + i));
            }
            std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
            Vector best = Vector::load(scores);
            for (int i = Vector::width; i < padded; i += Vector::width) {
                best = laneway::larger(best, Vector::load(scores + i));
            }
            float largest = best.largest();
            float *values = sum.values + head * shape.size;
            if (is_first) {
                sum.total[head] = 0.0f;
                std::fill(values, values + shape.size, 0.0f);
            } else if (largest > sum.largest[head]) {
                const float factor = exponential(sum.largest[head] - largest);
                sum.total[head] *= factor;
                scale_values(values, shape.size, factor);
            } else {
                largest = sum.largest[head];
            }
            sum.largest[head] = largest;
            const Vector base = Vector::all(largest);
            Vector total = faults;
            for (int i = 0; i < padded; i += Vector::width) {
                const Vector weight = laneway::exponential(Vector::load(scores + i) - base);
                weight.store(scores + i);
                total = total + weight;
            }
            sum.total[head] += total.sum();
        }
    }

    template <typename Source, int count_heads> void add_values(const int32_t *cells, int count, int head, Sum &sum) {
        constexpr int wide = Vector::columns * Vector::width;
        int column = 0;
        for (; column + wide <= shape.size; column += wide) {
            add_columns<Source, count_heads, Vector::columns>(cells, count, head, column, sum);
        }
        for (; column < shape.size; column += Vector::width) {
            add_columns<Source, count_heads, 1>(cells, count, head, column, sum);
        }
    }

    template <typename Source, int count_heads, int columns>
    void add_columns(const int32_t *cells, int count, int head, int column, Sum &sum) {
        const int size = shape.size;
        const size_t stride = shape.v->nb[1];
        float *out = sum.values + head * size + column;
        const float *weight = weights + head * block;
        Vector values[count_heads][columns];
        UNROLLED
        for (int h = 0; h < count_heads; ++h) {
            UNROLLED
            for (int c = 0; c < columns; ++c) {
                values[h][c] = Vector::load(out + h * size + c * Vector::width);
            }
        }
        for (int i = 0; i < count; ++i) {
            const char *value = values_at + static_cast<size_t>(cells[i]) * stride;
            Vector loaded[columns];
            UNROLLED
            for (int c = 0; c < columns; ++c) {
                loaded[c] = Source::load(value, column + c * Vector::width);
            }
            UNROLLED
            for (int h = 0; h < count_heads; ++h) {
                const Vector by = Vector::all(weight[h * block + i]);
                UNROLLED
                for (int c = 0; c < columns; ++c) {
                    values[h][c] = laneway::fused(by, loaded[c], values[h][c]);
                }
            }
        }
        UNROLLED
        for (int h = 0; h < count_heads; ++h) {
            UNROLLED
            for (int c = 0; c < columns; ++c) {
                values[h][c].store(out + h * size + c * Vector::width);
            }
        }
    }

    const Shape &shape;
    float *queries, *keys, *weights;

public:
    Sum first, second;

private:
    int row = 0, head_kv = 0, first_head = 0, heads = 0;
    const char *keys_at = nullptr, *values_at = nullptr;
};

// c = a b, or c + a b: a has `depth` columns, b as many rows.  Parts of the result stay in registers meanwhile.
template <int rows, int columns>
void multiply_part(int depth, const float *a, int a_stride, const float *b, int b_stride, float *c, int c_stride, bool add) {
    Vector sums[rows][columns];
    UNROLLED
    for (int i = 0; i < rows; ++i) {
        UNROLLED
        for (int j = 0; j < columns; ++j) {
            sums[i][j] = add ? Vector::load(c + i * c_stride + j * Vector::width) : Vector::zero();
        }
    }
    for (int k = 0; k < depth; ++k) {
        Vector row[columns];
        UNROLLED
        for (int j = 0; j < columns; ++j) {
            row[j] = Vector::load(b + k * b_stride + j * Vector::width);
        }
        UNROLLED
        for (int i = 0; i < rows; ++i) {
            const Vector by = Vector::all(a[i * a_stride + k]);
            UNROLLED
            for (int j = 0; j < columns; ++j) {
                sums[i][j] = laneway::fused(by, row[j], sums[i][j]);
            }
        }
    }
    UNROLLED
    for (int i = 0; i < rows; ++i) {
        UNROLLED
        for (int j = 0; j < columns; ++j) {
            sums[i][j].store(c + i * c_stride + j * Vector::width);
        }
    }
}

template <int columns>
void multiply_columns(int rows, int depth, const float *a, int a_stride, const float *b, int b_stride, float *c, int c_stride,
                      bool add) {
    int i = 0;
    for (; i + 6 <= rows; i += 6) {
        multiply_part<6, columns>(depth, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, add);
    }
    for (; i + 2 <= rows; i += 2) {
        multiply_part<2, columns>(depth, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, add);
    }
    if (i < rows) {
        multiply_part<1, columns>(depth, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, add);
    }
}

void multiply(int rows, int columns, int depth, const float *a, int a_stride, const float *b, int b_stride, float *c,
              int c_stride, bool add) {
    constexpr int wide = Vector::columns * Vector::width;
    int j = 0;
    for (; j + wide <= columns; j += wide) {
        multiply_columns<Vector::columns>(rows, depth, a, a_stride, b + j, b_stride, c + j, c_stride, add);
    }
    for (; j < columns; j += Vector::width) {
        multiply_columns<1>(rows, depth, a, a_stride, b + j, b_stride, c + j, c_stride, add);
    }
}

// The bits of `bits` that stand where `mask` has one, side by side.
uint64_t side_by_side(uint64_t bits, uint64_t mask) {
    if (mask == ~uint64_t{0}) {
        return bits;
    }
    uint64_t result = 0;
    for (int i = 0; mask; ++i) {
        result |= (bits >> lowest_bit(mask) & 1) << i;
        mask &= mask - 1;
    }
    return result;
}

// Rows that see mostly the same cells, as those of one prompt do: keys and values are read once for all of them, and
// scores and weighted values are products of matrices.
class Tile {
public:
    static size_t floats(const Shape &shape) {
        const size_t size = static_cast<size_t>(shape.size);
        return most_queries * (2 * size + block + 2) + 2 * block * size;
    }

    Tile(const Shape &shape, float *memory)
        : shape(shape), queries(memory), scores(queries + most_queries * shape.size), keys(scores + most_queries * block),
          values(keys + block * shape.size), results(values + block * shape.size),
          largest(results + most_queries * shape.size), total(largest + most_queries) {}

    // bitmaps: of the rows, one after the other.
    void attend(int first_row, int rows, int item, const uint64_t *bitmaps) {
        switch (shape.k->type) {
        case GGML_TYPE_F16:
            return attend_of<Halves>(first_row, rows, item, bitmaps);
        case GGML_TYPE_F32:
            return attend_of<Floats>(first_row, rows, item, bitmaps);
        default:
            return attend_of<Bytes>(first_row, rows, item, bitmaps);
        }
    }

private:
    template <typename Source> void attend_of(int first_row, int rows, int item, const uint64_t *bitmaps) {
        const int size = shape.size, words = shape.words();
        const int head_kv = item / shape.parts, part = item % shape.parts;
        const int first_head = head_kv * shape.group + part * shape.together;
        const int heads = std::min(shape.together, shape.group - part * shape.together);
        const char *keys_at = shape.cells_of(shape.k, first_row, head_kv);
        const char *values_at = shape.cells_of(shape.v, first_row, head_kv);
        const int count = rows * heads;

        const Vector scale = Vector::all(shape.scale);
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < heads; ++head) {
                const float *from = shape.query_of(first_row + row, first_head + head);
                float *to = queries + (row * heads + head) * size;
                for (int i = 0; i < size; i += Vector::width) {
                    (Vector::load(from + i) * scale).store(to + i);
                }
            }
        }
        std::fill(results, results + count * size, 0.0f);
        std::fill(largest, largest + count, -std::numeric_limits<float>::infinity());
        std::fill(total, total + count, 0.0f);

        int32_t cells[block];
        uint64_t seen[most_queries];
        int filled = 0;
        for (int word = 0; word < words; ++word) {
            uint64_t any = 0;
            for (int row = 0; row < rows; ++row) {
                any |= bitmaps[row * words + word];
            }
            if (!any) {
                continue;
            }
            if (filled + bits_set(any) > block) {
                add_block<Source>(keys_at, values_at, cells, filled, seen, rows, heads);
                filled = 0;
            }
            if (filled == 0) {
                std::fill(seen, seen + rows, uint64_t{0});
            }
            for (int row = 0; row < rows; ++row) {
                seen[row] |= side_by_side(bitmaps[row * words + word], any) << filled;
            }
            for (uint64_t left = any; left; left &= left - 1) {
                cells[filled++] = 64 * word + lowest_bit(left);
            }
        }
        if (filled > 0) {
            add_block<Source>(keys_at, values_at, cells, filled, seen, rows, heads);
        }
        for (int row = 0; row < rows; ++row) {
            finish(shape, Sum(largest + row * heads, total + row * heads, results + row * heads * size), first_row + row,
                   first_head, heads);
        }
    }

    template <typename Source>
    void add_block(const char *keys_at, const char *values_at, const int32_t *cells, int count, const uint64_t *seen, int rows,
                   int heads) {
        const int size = shape.size, queries_count = rows * heads;
        const int padded = (count + Vector::width - 1) / Vector::width * Vector::width;
        for (int c = 0; c < padded; c += Vector::width) {
            for (int i = 0; i < size; i += Vector::width) {
                Vector square[Vector::width];
                for (int j = 0; j < Vector::width; ++j) {
                    square[j] = c + j < count ? Source::load(keys_at + static_cast<size_t>(cells[c + j]) * shape.k->nb[1], i)
                                              : Vector::zero();
                }
                laneway::transpose(square);
                for (int j = 0; j < Vector::width; ++j) {
                    square[j].store(keys + (i + j) * block + c);
                }
            }
        }
        Vector faults = Vector::zero();
        for (int c = 0; c < count; ++c) {
            const char *value = values_at + static_cast<size_t>(cells[c]) * shape.v->nb[1];
            for (int i = 0; i < size; i += Vector::width) {
                const Vector loaded = Source::load(value, i);
                loaded.store(values + c * size + i);
                faults = faults + laneway::fault_of(loaded);
            }
        }
        multiply(queries_count, padded, size, queries, size, keys, block, scores, block, false);
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < heads; ++head) {
                weigh(row * heads + head, padded, seen[row]);
            }
        }
        if (faults.sum() == 0.0f) {
            multiply(queries_count, size, count, scores, block, values, size, results, size, true);
        } else {
            add_seen(count, seen, rows, heads);
        }
    }

    // The weighted values of what each row sees, and of nothing else: a weight of zero does not silence NaN.
    void add_seen(int count, const uint64_t *seen, int rows, int heads) {
        for (int query = 0; query < rows * heads; ++query) {
            for (int c = 0; c < count; ++c) {
                if (seen[query / heads] >> c & 1) {
                    multiply(1, shape.size, 1, scores + query * block + c, block, values + c * shape.size, shape.size,
                             results + query * shape.size, shape.size, true);
                }
            }
        }
    }

    // Scores of one query become weights.
    void weigh(int query, int padded, uint64_t seen) {
        float *score = scores + query * block;
        if (seen == 0) {
            std::fill(score, score + padded, 0.0f);
            return;
        }
        const Vector hidden = Vector::all(-std::numeric_limits<float>::infinity());
        Vector best = hidden, faults = Vector::zero();
        for (int i = 0; i < padded; i += Vector::width) {
            Vector these = Vector::load(score + i);
            faults = faults + laneway::fault_of(laneway::where_set(seen >> i, these, Vector::zero()));
            if (shape.cap != 0.0f) {
                these = laneway::hyperbolic_tangent(these) * Vector::all(shape.cap);
            }
            these = laneway::where_set(seen >> i, these, hidden);
            these.store(score + i);
            best = laneway::larger(best, these);
        }
        float now = best.largest();
        if (now > largest[query]) {
            const float factor = exponential(largest[query] - now);
            total[query] *= factor;
            scale_values(results + query * shape.size, shape.size, factor);
            largest[query] = now;
        } else {
            now = largest[query];
        }
        const Vector base = Vector::all(now);
        Vector sum = faults;
        for (int i = 0; i < padded; i += Vector::width) {
            const Vector weight = laneway::exponential(Vector::load(score + i) - base);
            weight.store(score + i);
            sum = sum + weight;
        }
        total[query] += sum.sum();
    }

    const Shape &shape;
    float *queries, *scores, *keys, *values, *results, *largest, *total;
};

// Memory that all threads see: first what is left of the operation's work buffer, and where that is too small, memory of
// the first thread's own, which it keeps for the next time.
class OwnMemory {
public:
    // Null if there is none.
    char *get(size_t bytes) {
        if (bytes > size) {
            memory.reset(new (std::nothrow) char[bytes]);
            size = memory ? bytes : 0;
        }
        return memory.get();
    }

private:
    std::unique_ptr<char[]> memory;
    size_t size = 0;
};

struct Header {
    char *rows;
    char *spans;
};

// What a row of the mask comes to.
struct Row {
    int32_t count;
    int32_t biased;
    int32_t tiled; // the rows of the tile that begins here; 0: none

    int span_cells() const {
        const int even = (count + most_spans - 1) / most_spans;
        return std::max(least_span, (even + 15) / 16 * 16);
    }
    int spans() const { return (count + span_cells() - 1) / span_cells(); }
};

void make_row(const Shape &shape, int index, Row &row, uint64_t *bitmap) {
    const uint16_t *mask = shape.mask_of(index);
    const int words = shape.words(), rest = shape.cells % 64;
    bool biased = false;
    int count = 0;
    for (int i = 0; i < words; ++i) {
        uint64_t bits = ~uint64_t{0};
        const bool partial = rest != 0 && i == words - 1;
        if (mask && partial) {
            uint16_t padded[64];
            std::fill(padded, padded + 64, laneway::half_minus_infinity);
            std::copy(mask + 64 * i, mask + 64 * i + rest, padded);
            bits = laneway::unmasked_64(padded, biased);
        } else if (mask) {
            bits = laneway::unmasked_64(mask + 64 * i, biased);
        } else if (partial) {
            bits >>= 64 - rest;
        }
        bitmap[i] = bits;
        count += bits_set(bits);
    }
    row.count = count;
    row.biased = biased;
    row.tiled = 0;
}

// Whether these rows see so much of the same that computing all of them for all cells costs less.
bool is_tile(const Shape &shape, const Row *row, const uint64_t *bitmaps, int rows) {
    int64_t each = 0, together = 0;
    for (int i = 0; i < rows; ++i) {
        if (row[i].biased) {
            return false;
        }
        each += row[i].count;
    }
    for (int word = 0, words = shape.words(); word < words; ++word) {
        uint64_t any = 0;
        for (int i = 0; i < rows; ++i) {
            any |= bitmaps[i * words + word];
        }
        together += bits_set(any);
    }
    return rows >= least_rows && together * rows <= 2 * each;
}

// False: nothing was computed, which all threads see alike.
bool attend(const ggml_compute_params *params, const Shape &shape) {
    const int thread = params->ith, threads = params->nth;
    size_t own = in_lines(Worker::floats(shape) * sizeof(float));
    const int tile_rows = shape.tile_rows();
    const size_t with_tiles = in_lines(std::max(Worker::floats(shape), Tile::floats(shape)) * sizeof(float));
    const bool tiling = std::min(tile_rows, shape.rows) >= least_rows &&
                        with_tiles * static_cast<size_t>(threads) + in_lines(sizeof(Header)) <= params->wsize;
    own = tiling ? with_tiles : own;
    const size_t fixed = own * static_cast<size_t>(threads) + in_lines(sizeof(Header));
    if (params->wsize < fixed) {
        return false;
    }
    char *buffer = static_cast<char *>(params->wdata);
    Header *header = reinterpret_cast<Header *>(buffer);
    float *own_memory = reinterpret_cast<float *>(buffer + in_lines(sizeof(Header)) + own * static_cast<size_t>(thread));
    Worker worker(shape, own_memory);
    Tile tile(shape, own_memory);
    char *left = buffer + fixed;
    size_t left_bytes = params->wsize - fixed;
    static thread_local OwnMemory row_memory, span_memory;

    const int rows = shape.all_rows();
    const size_t row_bytes = in_lines(sizeof(Row) * static_cast<size_t>(rows));
    const size_t words = static_cast<size_t>(shape.words());
    const size_t need = row_bytes + in_lines(words * sizeof(uint64_t) * static_cast<size_t>(rows));
    char *row_area = left;
    if (need <= left_bytes) {
        left += need;
        left_bytes -= need;
    } else {
        if (thread == 0) {
            header->rows = row_memory.get(need);
        }
        ggml_barrier(params->threadpool);
        row_area = header->rows;
        if (!row_area) {
            ggml_barrier(params->threadpool); // all have seen it before the buffer gets other uses
            return false;
        }
    }
    Row *row = reinterpret_cast<Row *>(row_area);
    uint64_t *bitmaps = reinterpret_cast<uint64_t *>(row_area + row_bytes);
    if (thread == 0) {
        ggml_threadpool_chunk_set(params->threadpool, threads);
        laneway_ggml_attention_count();
    }
    // Rows are made into bitmaps, and where tiles are possible, in groups that may become one.
    const int group_rows = tiling ? tile_rows : 1;
    const auto group_end = [&](int begin) {
        return std::min(begin + group_rows, (begin / shape.rows + 1) * shape.rows);
    };
    for (int begin = 0, number = 0; begin < rows; begin = group_end(begin), ++number) {
        if (number % threads != thread) {
            continue;
        }
        const int end = group_end(begin);
        for (int i = begin; i < end; ++i) {
            make_row(shape, i, row[i], bitmaps + words * static_cast<size_t>(i));
        }
        if (tiling && is_tile(shape, row + begin, bitmaps + words * static_cast<size_t>(begin), end - begin)) {
            row[begin].tiled = end - begin;
        }
    }
    ggml_barrier(params->threadpool);

    // A row is cut where an item of it is more than a thread's share of the work can be.
    int64_t total = 0;
    for (int i = 0; i < rows; ++i) {
        total += static_cast<int64_t>(row[i].count) * shape.items();
    }
    const int64_t large = total / (static_cast<int64_t>(threads) * shares);
    bool cutting = threads > 1;
    const auto is_cut = [&](int i) { return cutting && !row[i].tiled && row[i].count > large && row[i].spans() > 1; };
    const auto next = [&](int i) { return i + std::max(1, row[i].tiled); };
    const size_t sum_floats = Sum::floats(shape);
    size_t span_bytes = 0;
    for (int i = 0; i < rows; i = next(i)) {
        if (is_cut(i)) {
            span_bytes += sum_floats * sizeof(float) * static_cast<size_t>(row[i].spans() * shape.items());
        }
    }
    float *spans = reinterpret_cast<float *>(left);
    if (span_bytes > left_bytes) {
        if (thread == 0) {
            header->spans = span_memory.get(span_bytes);
        }
        ggml_barrier(params->threadpool);
        spans = reinterpret_cast<float *>(header->spans);
        cutting = spans != nullptr;
    }

    // Pieces of work are numbered, and each thread takes the next one that nobody has.  The numbers that a thread gets
    // ascend, so it walks over the rows once.
    int at = 0, begin = 0;
    size_t offset = 0;
    const auto pieces = [&](int i) { return is_cut(i) ? row[i].spans() * shape.items() : shape.items(); };
    for (int piece = thread;; piece = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        while (at < rows && piece >= begin + pieces(at)) {
            begin += pieces(at);
            offset += is_cut(at) ? sum_floats * static_cast<size_t>(pieces(at)) : 0;
            at = next(at);
        }
        if (at == rows) {
            break;
        }
        const Row &this_row = row[at];
        const uint64_t *bitmap = bitmaps + words * static_cast<size_t>(at);
        const int index = piece - begin;
        if (this_row.tiled) {
            tile.attend(at, this_row.tiled, index, bitmap);
        } else if (is_cut(at)) {
            const int count = this_row.spans(), span = index % count, cells = this_row.span_cells();
            worker.begin(at, index / count);
            Cells unmasked(bitmap, span * cells);
            Sum sum(shape, spans + offset + sum_floats * static_cast<size_t>(index));
            worker.span(unmasked, std::min(cells, this_row.count - span * cells), this_row.biased != 0, sum);
        } else {
            worker.begin(at, index);
            worker.whole_row(bitmap, this_row.count, this_row.span_cells(), this_row.biased != 0);
        }
    }

    if (span_bytes > 0 && cutting) {
        ggml_barrier(params->threadpool);
        int number = 0;
        offset = 0;
        for (int i = 0; i < rows; i = next(i)) {
            if (!is_cut(i)) {
                continue;
            }
            const size_t item_floats = sum_floats * static_cast<size_t>(row[i].spans());
            for (int item = 0; item < shape.items(); ++item, ++number) {
                if (number % threads == thread) {
                    worker.begin(i, item);
                    worker.merge_spans(spans + offset, row[i].spans());
                }
                offset += item_floats;
            }
        }
    }
    return true;
}

} // namespace

void ggml_compute_forward_flash_attn_ext(const ggml_compute_params *params, ggml_tensor *out) {
    if (handles(params, out) && attend(params, Shape(out))) {
        return;
    }
    laneway_stock_flash_attn_ext(params, out);
}

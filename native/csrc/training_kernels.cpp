#include "training_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__GNUC__)
// Vectors wider than the processor's are handed over in memory, by functions that are all in this file.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace laneway {

namespace {

// Sums of a tile stay in registers: 24 of the 32 that AVX-512 has, 8 pairs of the 32 that ARM has.
#if defined(__AVX512F__)
constexpr int lanes = 16, tile_rows = 6, tile_vectors = 4;
#else
constexpr int lanes = 8, tile_rows = 4, tile_vectors = 2;
#endif

typedef float Vector __attribute__((vector_size(lanes * sizeof(float))));
typedef int32_t Whole __attribute__((vector_size(lanes * sizeof(int32_t))));
typedef float Loose __attribute__((vector_size(lanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float *from) { return *reinterpret_cast<const Loose *>(from); }
inline void store(float *to, Vector v) { *reinterpret_cast<Loose *>(to) = v; }

// Depth of one pass over the right side, and the columns that a thread unpacks at once: 128 x 256 floats stay in its
// second cache, 128 x 64 of them in the first.
constexpr int64_t depth_block = 128, panel_columns = 256;

template <int Rows, int Vectors>
void tile(float *c, int64_t c_row, int64_t depth, const float *left, int64_t left_row, int64_t left_depth, const float *right,
          int64_t right_row, bool add) {
    Vector sums[Rows][Vectors];
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) {
            sums[m][v] = add ? load(c + m * c_row + v * lanes) : Vector{};
        }
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vector columns[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) {
            columns[v] = load(right + k * right_row + v * lanes);
        }
#pragma GCC unroll 8
        for (int m = 0; m < Rows; ++m) {
            const float value = left[m * left_row + k * left_depth];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) {
                sums[m][v] += value * columns[v];
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) {
            store(c + m * c_row + v * lanes, sums[m][v]);
        }
    }
}

template <int Vectors>
void column_block(float *c, int64_t c_row, int64_t rows, int64_t depth, const float *left, int64_t left_row,
                  int64_t left_depth, const float *right, int64_t right_row, bool add) {
    int64_t m = 0;
    for (; m + tile_rows <= rows; m += tile_rows) {
        tile<tile_rows, Vectors>(c + m * c_row, c_row, depth, left + m * left_row, left_row, left_depth, right, right_row, add);
    }
    for (; m + 2 <= rows; m += 2) {
        tile<2, Vectors>(c + m * c_row, c_row, depth, left + m * left_row, left_row, left_depth, right, right_row, add);
    }
    for (; m < rows; ++m) {
        tile<1, Vectors>(c + m * c_row, c_row, depth, left + m * left_row, left_row, left_depth, right, right_row, add);
    }
}

// Fewer columns than lanes: the same on a copy that is filled up with zeros.
void last_columns(float *c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth, const float *left, int64_t left_row,
                  int64_t left_depth, const float *right, int64_t right_row, bool add) {
    float wide[depth_block * lanes] = {};
    for (int64_t k = 0; k < depth; ++k) {
        std::copy_n(right + k * right_row, columns, wide + k * lanes);
    }
    for (int64_t m = 0; m < rows; m += tile_rows) {
        const int64_t count = std::min<int64_t>(tile_rows, rows - m);
        float sums[tile_rows * lanes];
        column_block<1>(sums, lanes, count, depth, left + m * left_row, left_row, left_depth, wide, lanes, false);
        for (int64_t i = 0; i < count; ++i) {
            float *row = c + (m + i) * c_row;
            for (int64_t j = 0; j < columns; ++j) {
                row[j] = (add ? row[j] : 0.0f) + sums[i * lanes + j];
            }
        }
    }
}

// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2, by Taylor's series to the seventh power; for x <= 0 or small.
inline Vector exp_of(Vector x) {
    const Vector lowest = Vector{} - 87.0f, highest = Vector{} + 88.0f;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const Vector magic = Vector{} + 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
    const Vector n = (x * 1.44269504f + magic) - magic;
    const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector sum = Vector{} + 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const Whole exponent = (__builtin_convertvector(n, Whole) + 127) << 23;
    return sum * (Vector)exponent; // the bits, not the number
}

inline float exp_of(float x) {
    Vector v = Vector{} + x;
    return exp_of(v)[0];
}

inline float sum_of(Vector v) {
    float sum = 0.0f;
    for (int i = 0; i < lanes; ++i) {
        sum += v[i];
    }
    return sum;
}

// row becomes exp(row * scale - largest), or 0 where it is; returns the sum of it.
struct Exponentials {
    float largest;
    float sum;
};

Exponentials exponentials(float *row, int64_t count, float scale) {
    const int64_t whole = count - count % lanes;
    float largest = -std::numeric_limits<float>::infinity();
    if (whole) {
        Vector top = load(row);
        for (int64_t i = lanes; i < whole; i += lanes) {
            const Vector v = load(row + i);
            top = v > top ? v : top;
        }
        for (int i = 0; i < lanes; ++i) {
            largest = std::max(largest, top[i]);
        }
    }
    for (int64_t i = whole; i < count; ++i) {
        largest = std::max(largest, row[i]);
    }
    largest *= scale;
    Vector sums = {};
    for (int64_t i = 0; i < whole; i += lanes) {
        const Vector e = exp_of(load(row + i) * scale - largest);
        store(row + i, e);
        sums += e;
    }
    float sum = sum_of(sums);
    for (int64_t i = whole; i < count; ++i) {
        row[i] = exp_of(row[i] * scale - largest);
        sum += row[i];
    }
    return {largest, sum};
}

void scale_by(float *row, int64_t count, float factor) {
    for (int64_t i = 0; i < count; ++i) {
        row[i] *= factor;
    }
}

float dot(const float *a, const float *b, int64_t count) {
    Vector sums = {};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        sums += load(a + i) * load(b + i);
    }
    float sum = sum_of(sums);
    for (; i < count; ++i) {
        sum += a[i] * b[i];
    }
    return sum;
}

const float *floats(const ggml_tensor *t) { return static_cast<const float *>(t->data); }
float *floats(ggml_tensor *t) { return static_cast<float *>(t->data); }
int64_t row_of(const ggml_tensor *t) { return static_cast<int64_t>(t->nb[1] / sizeof(float)); }
// Of a tensor that has heads as its second dimension: from one token to the next.
int64_t token_of(const ggml_tensor *t) { return static_cast<int64_t>(t->nb[2] / sizeof(float)); }

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// A thread's own room, kept from one operation to the next.
float *room(size_t which, int64_t count) {
    thread_local std::vector<float> rooms[4];
    std::vector<float> &found = rooms[which];
    const size_t wanted = static_cast<size_t>(count) + lanes;
    if (found.size() < wanted) {
        found.resize(wanted);
    }
    return found.data();
}

// Rows [from, from + count) of a matrix, columns [column, column + width), as floats beside each other.
void unpack(float *to, const ggml_tensor *matrix, int64_t from, int64_t count, int64_t column, int64_t width) {
    const ggml_type_traits *traits = ggml_get_type_traits(matrix->type);
    const size_t skip = static_cast<size_t>(column / traits->blck_size) * traits->type_size;
    for (int64_t k = 0; k < count; ++k) {
        const char *row = static_cast<const char *>(matrix->data) + static_cast<size_t>(from + k) * matrix->nb[1] + skip;
        if (matrix->type == GGML_TYPE_F32) {
            std::memcpy(to + k * width, row, static_cast<size_t>(width) * sizeof(float));
        } else {
            traits->to_float(row, to + k * width, width);
        }
    }
}

// Columns [begin, end) of `columns` for one of several threads.
struct Share {
    int64_t begin, end;
};

Share share_of(int64_t columns, int ith, int nth) {
    const int64_t width = rounded_up((columns + nth - 1) / nth, lanes);
    return {std::min(columns, ith * width), std::min(columns, (ith + 1) * width)};
}

constexpr int64_t query_rows = 32;

// keys or values of one head, transposed: size rows of `length` tokens, and zeros up to `padded`.
void transpose(float *to, int64_t padded, const float *from, int64_t token, int64_t length, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        float *row = to + i * padded;
        for (int64_t n = 0; n < length; ++n) {
            row[n] = from[n * token + i];
        }
        std::fill(row + length, row + padded, 0.0f);
    }
}

// Weights of attention of query rows [from, to) of a segment: rows of `padded` numbers, zero behind the row's own token.
void weigh(float *weights, int64_t padded, const float *queries, int64_t token, const float *keys, int64_t from, int64_t to,
           int64_t size, float scale) {
    const int64_t seen = std::min(padded, rounded_up(to, lanes));
    multiply(weights, padded, to - from, seen, size, queries + from * token, token, 1, keys, padded, false);
    for (int64_t i = from; i < to; ++i) {
        float *row = weights + (i - from) * padded;
        const Exponentials e = exponentials(row, i + 1, scale);
        scale_by(row, i + 1, 1.0f / e.sum);
        std::fill(row + i + 1, row + seen, 0.0f);
    }
}

} // namespace

void multiply(float *c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth, const float *left, int64_t left_row,
              int64_t left_depth, const float *right, int64_t right_row, bool add) {
    for (int64_t from = 0; from < depth; from += depth_block) {
        const int64_t count = std::min(depth_block, depth - from);
        const float *l = left + from * left_depth, *r = right + from * right_row;
        const bool adding = add || from > 0;
        int64_t column = 0;
        for (; column + tile_vectors * lanes <= columns; column += tile_vectors * lanes) {
            column_block<tile_vectors>(c + column, c_row, rows, count, l, left_row, left_depth, r + column, right_row, adding);
        }
        for (; column + lanes <= columns; column += lanes) {
            column_block<1>(c + column, c_row, rows, count, l, left_row, left_depth, r + column, right_row, adding);
        }
        if (column < columns) {
            last_columns(c + column, c_row, rows, columns - column, count, l, left_row, left_depth, r + column, right_row, adding);
        }
    }
    if (depth == 0 && !add) {
        for (int64_t m = 0; m < rows; ++m) {
            std::fill(c + m * c_row, c + m * c_row + columns, 0.0f);
        }
    }
}

void pass_through(ggml_tensor *dst, int ith, int nth, void *) {
    const ggml_tensor *matrix = dst->src[0], *given = dst->src[1];
    const int64_t depth = matrix->ne[0], columns = matrix->ne[1], tokens = given->ne[1];
    constexpr int64_t width = tile_vectors * lanes;
    // Whole blocks of every type there is.
    constexpr int64_t deep = panel_columns;
    float *rows = room(0, width * deep), *panel = room(1, deep * width);
    for (int64_t column = ith * width; column < columns; column += nth * width) {
        const int64_t taken = std::min(width, columns - column);
        for (int64_t from = 0; from < depth; from += deep) {
            const int64_t count = std::min(deep, depth - from);
            unpack(rows, matrix, column, taken, from, count);
            // Blocks that fit into the first cache on both sides.
            for (int64_t k = 0; k < count; k += lanes) {
                const int64_t last = std::min<int64_t>(count, k + lanes);
                for (int64_t j = 0; j < taken; ++j) {
                    for (int64_t i = k; i < last; ++i) {
                        panel[i * taken + j] = rows[j * count + i];
                    }
                }
            }
            multiply(floats(dst) + column, row_of(dst), tokens, taken, count, floats(given) + from, row_of(given), 1, panel,
                     taken, from > 0);
        }
    }
}

void back_through(ggml_tensor *dst, int ith, int nth, void *) {
    const bool add = dst->view_src != nullptr;
    const ggml_tensor *const *given = dst->src + (add ? 1 : 0);
    const ggml_tensor *matrix = given[0], *gradient = given[1], *small = given[2], *t = given[3];
    const int64_t columns = matrix->ne[0], depth = matrix->ne[1], tokens = gradient->ne[1];
    const int64_t unit = matrix->type == GGML_TYPE_F32 ? lanes : ggml_blck_size(matrix->type);
    // As many panels as threads, or a multiple of that, so that none waits for another; where there are too few columns
    // for it the tokens are parted too.
    int64_t panels = rounded_up((columns + panel_columns - 1) / panel_columns, nth);
    const int64_t width = std::min(rounded_up((columns + panels - 1) / panels, unit), rounded_up(panel_columns, unit));
    panels = (columns + width - 1) / width;
    const int64_t parts = panels >= nth ? 1 : (nth + panels - 1) / panels;
    const int64_t part_rows = rounded_up((tokens + parts - 1) / parts, tile_rows);

    float *panel = room(0, depth_block * width);
    for (int64_t item = ith; item < panels * parts; item += nth) {
        const int64_t column = item / parts * width, taken = std::min(width, columns - column);
        const int64_t begin = item % parts * part_rows, end = std::min(tokens, begin + part_rows);
        if (begin >= end) {
            continue;
        }
        float *out = floats(dst) + begin * row_of(dst) + column;
        for (int64_t from = 0; from < depth; from += depth_block) {
            const int64_t count = std::min(depth_block, depth - from);
            unpack(panel, matrix, from, count, column, taken);
            multiply(out, row_of(dst), end - begin, taken, count, floats(gradient) + begin * row_of(gradient) + from,
                     row_of(gradient), 1, panel, taken, add || from > 0);
        }
        if (small) {
            multiply(out, row_of(dst), end - begin, taken, small->ne[1], floats(t) + begin * row_of(t), row_of(t), 1,
                     floats(small) + column, row_of(small), true);
        }
    }
}

void add_outer(ggml_tensor *dst, int ith, int nth, void *) {
    const ggml_tensor *x = dst->src[1], *t = dst->src[2];
    const Share share = share_of(dst->ne[0], ith, nth);
    if (share.begin < share.end) {
        multiply(floats(dst) + share.begin, row_of(dst), dst->ne[1], share.end - share.begin, x->ne[1], floats(t), 1, row_of(t),
                 floats(x) + share.begin, row_of(x), true);
    }
}

void add_outer_transposed(ggml_tensor *dst, int ith, int nth, void *) {
    const ggml_tensor *t = dst->src[1], *y = dst->src[2];
    const int64_t ranks = dst->ne[0];
    const Share share = share_of(dst->ne[1], ith, nth);
    const int64_t width = share.end - share.begin;
    if (width <= 0) {
        return;
    }
    // Vectors along the long side; the short rows of dst would leave most of each unused.
    float *sums = room(0, ranks * width);
    multiply(sums, width, ranks, width, y->ne[1], floats(t), 1, row_of(t), floats(y) + share.begin, row_of(y), false);
    for (int64_t i = 0; i < width; ++i) {
        float *row = floats(dst) + (share.begin + i) * row_of(dst);
        for (int64_t j = 0; j < ranks; ++j) {
            row[j] += sums[j * width + i];
        }
    }
}

void attend(ggml_tensor *dst, int ith, int nth, void *data) {
    const AttentionShape &shape = *static_cast<const AttentionShape *>(data);
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2];
    const int64_t size = shape.size, group = shape.heads / shape.heads_kv;
    int64_t item = 0;
    for (const Segment &segment : *shape.segments) {
        const int64_t length = segment.end - segment.begin, padded = rounded_up(length, lanes);
        for (int64_t head = 0; head < shape.heads; ++head, ++item) {
            if (item % nth != ith) {
                continue;
            }
            const int64_t kv = head / group * size;
            float *keys = room(0, size * padded), *weights = room(1, query_rows * padded);
            transpose(keys, padded, floats(k) + segment.begin * token_of(k) + kv, token_of(k), length, size);
            const float *queries = floats(q) + segment.begin * token_of(q) + head * size;
            const float *values = floats(v) + segment.begin * token_of(v) + kv;
            float *out = floats(dst) + segment.begin * row_of(dst) + head * size;
            for (int64_t from = 0; from < length; from += query_rows) {
                const int64_t to = std::min(length, from + query_rows);
                weigh(weights, padded, queries, token_of(q), keys, from, to, size, shape.scale);
                multiply(out + from * row_of(dst), row_of(dst), to - from, size, to, weights, padded, 1, values, token_of(v),
                         false);
            }
        }
    }
}

void attend_back(ggml_tensor *dst, int ith, int nth, void *data) {
    const AttentionShape &shape = *static_cast<const AttentionShape *>(data);
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *gradient = dst->src[3];
    const int64_t size = shape.size, group = shape.heads / shape.heads_kv, out_row = row_of(dst);
    const int64_t k_at = shape.heads * size, v_at = k_at + shape.heads_kv * size;
    int64_t item = 0;
    for (const Segment &segment : *shape.segments) {
        const int64_t length = segment.end - segment.begin, padded = rounded_up(length, lanes);
        for (int64_t kv = 0; kv < shape.heads_kv; ++kv, ++item) {
            if (item % nth != ith) {
                continue;
            }
            float *keys = room(0, size * padded), *values = room(1, size * padded);
            float *weights = room(2, query_rows * padded), *slopes = room(3, query_rows * padded);
            const float *k_rows = floats(k) + segment.begin * token_of(k) + kv * size;
            transpose(keys, padded, k_rows, token_of(k), length, size);
            transpose(values, padded, floats(v) + segment.begin * token_of(v) + kv * size, token_of(v), length, size);
            float *out = floats(dst) + segment.begin * out_row;
            float *k_out = out + k_at + kv * size, *v_out = out + v_at + kv * size;
            for (int64_t n = 0; n < length; ++n) {
                std::fill_n(k_out + n * out_row, size, 0.0f);
                std::fill_n(v_out + n * out_row, size, 0.0f);
            }
            for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
                const float *queries = floats(q) + segment.begin * token_of(q) + head * size;
                const float *given = floats(gradient) + segment.begin * row_of(gradient) + head * size;
                for (int64_t from = 0; from < length; from += query_rows) {
                    const int64_t to = std::min(length, from + query_rows), rows = to - from;
                    const int64_t seen = std::min(padded, rounded_up(to, lanes));
                    weigh(weights, padded, queries, token_of(q), keys, from, to, size, shape.scale);
                    multiply(v_out, out_row, to, size, rows, weights, 1, padded, given + from * row_of(gradient),
                             row_of(gradient), true);
                    multiply(slopes, padded, rows, seen, size, given + from * row_of(gradient), row_of(gradient), 1, values,
                             padded, false);
                    for (int64_t i = 0; i < rows; ++i) {
                        float *slope = slopes + i * padded;
                        const float *weight = weights + i * padded;
                        const float mean = dot(slope, weight, seen);
                        for (int64_t j = 0; j < seen; ++j) {
                            slope[j] = weight[j] * (slope[j] - mean) * shape.scale;
                        }
                    }
                    multiply(out + from * out_row + head * size, out_row, rows, size, to, slopes, padded, 1, k_rows, token_of(k),
                             false);
                    multiply(k_out, out_row, to, size, rows, slopes, 1, padded, queries + from * token_of(q), token_of(q), true);
                }
            }
        }
    }
}

void cross_entropy(ggml_tensor *dst, int ith, int nth, void *data) {
    const LossRows &rows = *static_cast<const LossRows *>(data);
    const int64_t columns = dst->ne[0];
    for (int64_t i = ith; i < dst->ne[1]; i += nth) {
        float *row = floats(dst) + i * row_of(dst);
        const int32_t target = rows.targets[i];
        const double logit = row[target];
        const Exponentials e = exponentials(row, columns, 1.0f);
        rows.losses[i] = std::log(static_cast<double>(e.sum)) + e.largest - logit;
        if (rows.gradient) {
            scale_by(row, columns, rows.weight / e.sum);
            row[target] -= rows.weight;
        }
    }
}

void spread_rows(ggml_tensor *dst, int ith, int nth, void *) {
    const bool first = dst->view_src == nullptr;
    const ggml_tensor *given = dst->src[first ? 0 : 1], *rows = dst->src[first ? 1 : 2];
    const int32_t *places = static_cast<const int32_t *>(rows->data);
    const Share share = share_of(dst->ne[0], ith, nth);
    const int64_t width = share.end - share.begin;
    if (width <= 0) {
        return;
    }
    for (int64_t i = 0; first && i < dst->ne[1]; ++i) {
        std::fill_n(floats(dst) + i * row_of(dst) + share.begin, width, 0.0f);
    }
    for (int64_t i = 0; i < rows->ne[0]; ++i) {
        std::copy_n(floats(given) + i * row_of(given) + share.begin, width, floats(dst) + places[i] * row_of(dst) + share.begin);
    }
}

void swiglu_back(ggml_tensor *dst, int ith, int nth, void *) {
    const ggml_tensor *gate = dst->src[0], *up = dst->src[1], *gradient = dst->src[2];
    const int64_t columns = gate->ne[0];
    const auto one = [](auto g, auto u, auto d, auto e, auto *gate_out, auto *up_out) {
        // e = exp(-g); silu(g) = g s with s = 1 / (1 + e), its slope s (1 + g (1 - s)).
        const auto s = 1.0f / (1.0f + e);
        *gate_out = d * u * s * (1.0f + g * (1.0f - s));
        *up_out = d * g * s;
    };
    for (int64_t n = ith; n < gate->ne[1]; n += nth) {
        const float *g = floats(gate) + n * row_of(gate), *u = floats(up) + n * row_of(up);
        const float *d = floats(gradient) + n * row_of(gradient);
        float *gate_out = floats(dst) + n * row_of(dst), *up_out = gate_out + columns;
        int64_t i = 0;
        for (; i + lanes <= columns; i += lanes) {
            Vector to_gate, to_up;
            one(load(g + i), load(u + i), load(d + i), exp_of(-load(g + i)), &to_gate, &to_up);
            store(gate_out + i, to_gate);
            store(up_out + i, to_up);
        }
        for (; i < columns; ++i) {
            one(g[i], u[i], d[i], exp_of(-g[i]), gate_out + i, up_out + i);
        }
    }
}

} // namespace laneway

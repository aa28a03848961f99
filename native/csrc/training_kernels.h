// The arithmetic of a backward pass that ggml lacks, or has only as plain loops, as functions that ggml's threads call.
//
// All of it comes down to one product of matrices whose rows are contiguous on the right side.  No sum is shared between
// threads, so the same pass on the same number of threads gives the same bits.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace laneway {

// c (rows x columns) = or += left x right.  Left is read as left[row * left_row + k * left_depth], so it may lie
// transposed; right has `depth` rows of columns that lie beside each other.
void multiply(float *c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth, const float *left, int64_t left_row,
              int64_t left_depth, const float *right, int64_t right_row, bool add);

// Tokens [begin, end) that attend to each other, and to nobody else.
struct Segment {
    int64_t begin, end;
};

struct AttentionShape {
    int64_t size, heads, heads_kv; // size: numbers in a head
    float scale;
    const std::vector<Segment> *segments;
};

// What the loss of some rows of logits is made of, and where it goes.
struct LossRows {
    const int32_t *targets; // one for each row
    double *losses;
    float weight; // of each row in the sum that the gradient is of
    bool gradient;
};

// The rest are ggml_custom_op_t.

// dst = matrix x given, for a matrix of any type, which is unpacked: nothing is rounded on the way.  src: matrix, given.
void pass_through(ggml_tensor *dst, int ith, int nth, void *);

// dst = matrix^T x gradient [+ matrix2^T x gradient2], for matrices of any type (of F32 the second).
// src: matrix, gradient[, matrix2, gradient2]; in place: the sum so far comes first.
void back_through(ggml_tensor *dst, int ith, int nth, void *);

// In place: of dst (columns x rows) += the sum over tokens of x (columns) times t (rows).  src: dst, x, t.
void add_outer(ggml_tensor *dst, int ith, int nth, void *);

// The same where dst's rows are short: dst (ranks x rows).  src: dst, t (ranks), y (rows).
void add_outer_transposed(ggml_tensor *dst, int ith, int nth, void *);

// Causal attention within each segment.  src: q, k, v; dst like q.  data: AttentionShape.
void attend(ggml_tensor *dst, int ith, int nth, void *data);

// src: q, k, v, gradient of the result; dst has, for each token, the gradients of q, k and v one after the other.
void attend_back(ggml_tensor *dst, int ith, int nth, void *data);

// In place, on logits: each row becomes the gradient of its loss.  data: LossRows.
void cross_entropy(ggml_tensor *dst, int ith, int nth, void *data);

// Row number rows[i] of dst becomes row i of what is given, all others become zero.  src: given, rows; in place the others
// stay as they are.
void spread_rows(ggml_tensor *dst, int ith, int nth, void *);

// Of silu(gate) * up: the gradient of gate, and behind it that of up, for each token.  src: gate, up, gradient.
void swiglu_back(ggml_tensor *dst, int ith, int nth, void *);

} // namespace laneway

// The operators of a decoder's program and the batch that it runs, as Python describes them. Attention is in attention.h.
#pragma once

#include "attention.h"
#include "weights.h"

namespace orca {

constexpr int TILE_PANELS = 2;  // a GEMM's tile is two panels wide: 32 columns, or 16 gated ones

struct Gemm {  // target (+)= activation(norm(source) @ matrix.T + bias), or activation(gates) * ups
    Matrix matrix;
    Norm norm;
    const float* bias;  // [panels * 16]; null: 0
    int32_t source, target;
    Activation activation;
    int32_t is_gated;     // panels alternate: 16 gates, the 16 factors they belong to
    int32_t accumulates;  // adds to the target
    int32_t num_slices;   // of the features that go in, summed apart and added in a tree: 1 to MAX_SLICES
    int32_t is_partial;   // the target is this rank's slot of the next meeting
    int32_t column;       // of the target, where the first of the product's goes
    int32_t num_columns;  // columns that are written; the panels' padding is ignored
    float limit;          // clamped SwiGLU: bound of gates from above and of their factors, to which 1 is added; 0: none
    float slope;          // factor within the sigmoid
};
MLSYS_STRUCT(
    Gemm, matrix, norm, bias, source, target, activation, is_gated, accumulates, num_slices, is_partial, column, num_columns,
    limit, slope);

MLSYS_ENUM(Scoring, SOFTMAX_OF_CHOSEN, SOFTMAX, SIGMOID);
MLSYS_ENUM(GroupScore, LARGEST, TWO_LARGEST);

struct Route {  // chooses experts for each row: an entry for each of its choices
    int32_t source;   // the router's scores, [rows, num_experts]
    int32_t routing;  // index by which products find the entries
    int32_t num_experts, num_chosen;
    Scoring scoring;
    int32_t sums_to_one;      // weights are divided by their sum
    float scale;              // multiplies the weights
    const float* preference;  // [num_experts] added to what is compared, not to the weights; null: 0
    int32_t num_groups, num_chosen_groups;  // groups of neighbouring experts, and groups that are kept; 1, 1: all
    GroupScore group_score;   // score of a group
};
MLSYS_STRUCT(
    Route, source, routing, num_experts, num_chosen, scoring, sums_to_one, scale, preference, num_groups, num_chosen_groups,
    group_score);

// Rows of each of several products: the tokens that chose an expert, an expert's entries, or a part of every row.
MLSYS_ENUM(RowsOf, TOKENS, ENTRIES, PARTS);

struct Grouped {  // one product per matrix, all of one shape, each of its own rows
    Gemm gemm;               // the first product
    const Matrix* matrices;  // [count]
    const void* biases;      // [count] const float*; null: none has one
    int32_t count;
    RowsOf rows_of;
    int32_t routing;        // of tokens and entries: a register has an entry's features, then the next one's
    int32_t source_column;  // of parts: where the first one's features begin,
    int32_t source_step;    // from one to the next,
    int32_t target_step;    // and the same of what they give, from the product's column on
};
MLSYS_STRUCT(Grouped, gemm, matrices, biases, count, rows_of, routing, source_column, source_step, target_step);

struct Combine {  // target (+)= weighted sum of a row's entries, + sigmoid(gate) * shared
    int32_t source, target;
    int32_t routing;
    int32_t accumulates;
    const float* biases;  // [num_experts, stride] added to entries; null: 0
    int32_t stride;
    int32_t shared, gate;  // registers; -1: none, and a gate of 1
};
MLSYS_STRUCT(Combine, source, target, routing, accumulates, biases, stride, shared, gate);

struct Reduce {  // target (+)= the sum of all ranks' partial products + bias
    const float* bias;  // [panels * 16]; null: 0
    int32_t target;
    int32_t accumulates;
};
MLSYS_STRUCT(Reduce, bias, target, accumulates);

struct Normalise {  // target (+)= norm(source), of as many columns as the norm has features
    Norm norm;
    int32_t source, target;
    int32_t column;         // the first, of the source
    int32_t target_column;  // and of the target
    int32_t accumulates;
};
MLSYS_STRUCT(Normalise, norm, source, target, column, target_column, accumulates);

struct GatherRows {  // from here on this register, and what is computed from it, has the sampled rows alone
    int32_t taken;
};
MLSYS_STRUCT(GatherRows, taken);

struct Batch {
    int32_t num_rows, num_spans, num_sampled;
    const Span* spans;            // in row order
    const int32_t* block_tables;  // of all spans
    const int32_t* sampled;       // [num_sampled] rows
    const float* const* cos;      // per rotary, [num_rows, rotary_dim]
    const float* const* sin;
    float* states;  // register 0, [num_rows, its width]
    float* logits;  // the last register, [num_sampled, its width]; null: not wanted, `largest` is
    void* keys;     // [runs, layers, RUN blocks, kv heads, head_dim, 16], as kv_layout.h has it
    void* values;   // [runs, layers, RUN blocks, kv heads, 16, padded head_dim]
    int32_t num_layers;
    CacheKind cache;
    double* seconds;  // [operators] time of each, added up; null: not measured
    int64_t* largest;  // [num_sampled] where each row's largest logit is, the first of equals; null: not wanted
    float* peaks;      // [num_sampled] those logits; null: not wanted
    int64_t logits_stride;  // floats from one row of the logits to the next
    float* states_of_requests;  // of recurrent layers, [slots, state_stride]; null: there are none
    int64_t state_stride;
};
MLSYS_STRUCT(Batch, num_rows, num_spans, num_sampled, spans, block_tables, sampled, cos, sin, states, logits, keys,
    values, num_layers, cache, seconds, largest, peaks, logits_stride,
    states_of_requests, state_stride);

}  // namespace orca

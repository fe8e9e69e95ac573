// The rows of A that a GEMM reads.
#pragma once

#include "amx.h"
#include "integer.h"
#include "integer_blocks.h"
#include "operators.h"
#include "rows.h"
#include "scratch.h"

namespace orca {

constexpr int FEW_ROWS = 4;  // most rows that each thread prepares for itself, without a barrier

// The rows that a GEMM multiplies: a register's, or rows prepared from it (normalised, rounded to bf16, quantised). Few rows are
// prepared by each thread for itself, within its first claim: a late thread may not read what later operators write.
class GemmInput {
  public:
    GemmInput(const Gemm& op, const Register& source, int count, Scratch& own)
        : source(source), norm(op.norm), K(op.matrix.K), count(count),
          in_pairs(op.matrix.is_in_pairs()), in_codes(op.matrix.is_in_quads()), matrix(op.matrix),
          lda(in_codes ? CodedRow::size(matrix) : in_pairs ? K / 2 : K), ready(source.floats), own(own) {
        if (source.is_bf16 || (norm.kind == NO_NORM && !in_pairs && !in_codes)) return;
        ready = nullptr;
        // Where the result is added to its own source, all rows are prepared before any is written.
        by_all = count > FEW_ROWS || op.source == op.target;
    }

    bool is_prepared_by_all() const { return by_all; }

    void use(const float* rows) { ready = rows; }

    // `spare`: scratch of K floats.
    void prepare(int row, float* all, float* spare) const { prepare(source.floats + (int64_t)row * K, row, all, spare); }

    // As above, for a row that is elsewhere.
    void prepare(const float* from, int row, float* all, float* spare) const {
        float* to = all + row * lda;
        if (in_codes) {
            if (norm.kind != NO_NORM) normalise(norm, from, spare);
            quantise_row(norm.kind == NO_NORM ? from : spare, matrix, to);
        } else if (norm.kind == NO_NORM && !in_pairs)
            copy_row(from, to, K);
        else if (norm.kind == NO_NORM)
            convert_row(from, (uint16_t*)to, K);
        else if (in_pairs)
            normalise(norm, from, (uint16_t*)to);
        else
            normalise(norm, from, to);
    }

    const float* rows() {
        if (!ready) {
            float* to = own.grow((count + AMX_TILE_ROWS) * lda + K);
            for (int row = 0; row < count; row++) prepare(row, to, to + (count + AMX_TILE_ROWS) * lda);
            ready = to;
        }
        return ready;
    }

  private:
    const Register& source;
    const Norm& norm;
    const int K, count;
    const bool in_pairs, in_codes;
    const Matrix& matrix;

  public:
    const int64_t lda;  // of the prepared rows, in floats

  private:
    const float* ready;
    Scratch& own;
    bool by_all = false;
};

}  // namespace orca

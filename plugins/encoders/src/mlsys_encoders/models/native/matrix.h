// A weight as the products read it.
#pragma once

#include <mlsys/gemm.h>
#include <mlsys/layout.h>
#include <mlsys/math.h>

namespace encoder {

using namespace mlsys;

constexpr int VECS = LANES == 16 ? 3 : 2;
constexpr int NR = VECS * LANES;  // columns of a panel

// A weight [K, N] as panels [N / NR][K][NR]; columns beyond the last are zero.
struct Matrix {
    const float* panels;   // null: codes
    const float* bias;     // [panels * NR]
    const uint8_t* codes;  // with 128 added, [N / NR][K / 4][NR][4]
    const float* scales;   // of codes, [N / NR][K / 32][NR]
    int64_t K, N;
};
MLSYS_STRUCT(Matrix, panels, bias, codes, scales, K, N);

}  // namespace encoder

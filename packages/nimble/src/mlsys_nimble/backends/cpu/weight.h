// Element type of the weights of linears and convolutions: float32, or bf16 in the library built from kernels_bf16.cpp.
// Loads widen to float32; all sums are in float32.
#pragma once

#include "epilogue.h"

namespace nimble {

#ifdef NIMBLE_BF16_WEIGHTS
using Weight = uint16_t;
#else
using Weight = float;
#endif

}  // namespace nimble

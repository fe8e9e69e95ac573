// How weights of linears and convolutions are kept: float, or bf16 in the library that is made from kernels_bf16.cpp. They
// are widened as they are read; all sums are of floats.
#pragma once

#include "epilogue.h"

namespace nimble {

#ifdef NIMBLE_BF16_WEIGHTS
using Weight = uint16_t;
#else
using Weight = float;
#endif

}  // namespace nimble

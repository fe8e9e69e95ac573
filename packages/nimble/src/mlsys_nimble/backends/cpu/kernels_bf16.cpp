// Kernels with weights in bf16: those that kernels.cpp has for float, and products of pairs.
#define NIMBLE_BF16_WEIGHTS
#include "convolution.h"
#include "gemv.h"
#include "handle.h"
#include "pairs.h"

using namespace nimble;

extern "C" {
Kernel* make_convolution(const Convolution* arguments) { return new ConvolutionKernel(*arguments); }
Kernel* make_gemv(const Gemv* arguments) { return new GemvKernel(*arguments); }
Kernel* make_pairs_convolution(const PairsConvolution* arguments) { return new PairsConvolutionKernel(*arguments); }
}
MLSYS_FUNCTIONS(make_convolution, make_gemv, make_pairs_convolution);

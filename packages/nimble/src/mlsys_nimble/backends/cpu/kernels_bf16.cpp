// The kernels that may keep their weights in bf16, as kernels.cpp has them for float.
#define NIMBLE_BF16_WEIGHTS
#include "convolution.h"
#include "gemv.h"
#include "handle.h"

using namespace nimble;

extern "C" {
Kernel* make_convolution(const Convolution* arguments) { return new ConvolutionKernel(*arguments); }
Kernel* make_gemv(const Gemv* arguments) { return new GemvKernel(*arguments); }
}
MLSYS_FUNCTIONS(make_convolution, make_gemv);

// Integer kernels for quantised models, in a separate library: other models do not load it.
#include "coding.h"
#include "handle.h"
#include "integer_depthwise.h"
#include "integers.h"

using namespace nimble;

extern "C" {
Kernel* make_integer_convolution(const IntegerConvolution* arguments) { return new IntegerConvolutionKernel(*arguments); }
Kernel* make_integer_depthwise(const IntegerConvolution* arguments) { return new IntegerDepthwiseKernel(*arguments); }
Kernel* make_coding(const Coding* arguments) { return new CodingKernel(*arguments); }
Kernel* make_choose_scale(const ChooseScale* arguments) { return new ChooseScaleKernel(*arguments); }
Kernel* make_codes_pool(const CodesPool* arguments) { return new CodesPoolKernel(*arguments); }
}
MLSYS_FUNCTIONS(make_integer_convolution, make_integer_depthwise, make_coding, make_choose_scale, make_codes_pool);

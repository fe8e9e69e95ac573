// Every kernel's maker; the Python side has checked shapes, dtypes and strides.
#include "attention.h"
#include "comparison.h"
#include "convolution.h"
#include "copy.h"
#include "depthwise.h"
#include "dots.h"
#include "gemv.h"
#include "grouped.h"
#include "handle.h"
#include "indexing.h"
#include "pointwise.h"
#include "pool.h"
#include "rows.h"
#include "separable.h"
#include "winograd.h"

using namespace nimble;

extern "C" {
Kernel* make_convolution(const Convolution* arguments) { return new ConvolutionKernel(*arguments); }
Kernel* make_depthwise(const Depthwise* arguments) { return new DepthwiseKernel(*arguments); }
Kernel* make_grouped(const Grouped* arguments) { return new GroupedKernel(*arguments); }
Kernel* make_separable(const Separable* arguments) { return new SeparableKernel(*arguments); }
Kernel* make_winograd2(const Winograd* arguments) { return new WinogradKernel<2>(*arguments); }
Kernel* make_winograd4(const Winograd* arguments) { return new WinogradKernel<4>(*arguments); }
Kernel* make_gemv(const Gemv* arguments) { return new GemvKernel(*arguments); }
Kernel* make_dots(const Dots* arguments) { return new DotsKernel(*arguments); }
Kernel* make_copy(const Copy* arguments) { return new CopyKernel(*arguments); }
Kernel* make_pad(const Pad* arguments) { return new PadKernel(*arguments); }
Kernel* make_pointwise(const Pointwise* arguments) {
    switch (arguments->dtype) {
        case FLOAT32:
        case BFLOAT16: return new PointwiseKernel<float>(*arguments);
        case INT64:
        case INT32:
        case UINT8: return new PointwiseKernel<int64_t>(*arguments);
        default: return new PointwiseKernel<double>(*arguments);
    }
}
Kernel* make_pool(const Pool* arguments) { return new PoolKernel(*arguments); }
Kernel* make_reduce(const Reduce* arguments) { return new ReduceKernel(*arguments); }
Kernel* make_softmax(const Rows* arguments) { return new SoftmaxKernel(*arguments); }
Kernel* make_layer_norm(const Rows* arguments) { return new LayerNormKernel(*arguments); }
Kernel* make_matmul(const MatMul* arguments) { return new MatMulKernel(*arguments); }
Kernel* make_attention(const Attention* arguments) { return new AttentionKernel(*arguments); }
Kernel* make_embedding(const Embedding* arguments) { return new EmbeddingKernel(*arguments); }
Kernel* make_gather(const Gather* arguments) { return new GatherKernel(*arguments); }
Kernel* make_scatter_add(const ScatterAdd* arguments) { return new ScatterAddKernel(*arguments); }
Kernel* make_comparison(const Comparison* arguments) { return new ComparisonKernel(*arguments); }
}
MLSYS_FUNCTIONS(
    make_convolution, make_depthwise, make_grouped, make_separable, make_winograd2, make_winograd4, make_gemv, make_dots,
    make_copy, make_pad, make_pointwise, make_pool, make_reduce, make_softmax, make_layer_norm, make_matmul, make_attention,
    make_embedding, make_gather, make_scatter_add, make_comparison);

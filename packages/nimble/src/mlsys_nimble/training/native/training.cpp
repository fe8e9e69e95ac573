// Kernels of training, and running any kernels on the thread pool that torch has already.
//
// torch runs its convolutions and products on the threads of its OpenMP library. Threads of our own beside them would
// wait for the cores on which those spin, so kernels between torch's operators are run by the same pool: its entry point
// is found in the process at the first call, and without it kernels run on the caller's thread.
#include <dlfcn.h>

#include "../../backends/cpu/handle.h"
#include "attention.h"
#include "batch_norm.h"
#include "depthwise.h"
#include "layer_norm.h"
#include "gemm.h"
#include "winograd.h"

using namespace nimble;

// The thread sanitiser does not see OpenMP's barriers, so it is told of them: whoever released happens before whoever
// acquires.
#if defined(__has_feature)  // Clang's
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)  // GCC's
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#else
static inline void __tsan_acquire(void*) {}
static inline void __tsan_release(void*) {}
#endif

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using ThreadNumber = int (*)();

struct Share {
    const Kernel* kernel;
    int64_t left;  // told of by parts that end; those that begin hear of `kernel`, or a late one would seem to follow them
    char* scratch;
    int64_t scratch_step;
    ThreadNumber thread_number, num_threads;
};

void run_share(void* data) {
    __tsan_acquire(data);
    Share& share = *(Share*)data;
    const int64_t thread = share.thread_number(), threads = share.num_threads(), units = share.kernel->units;
    share.kernel->run(units * thread / threads, units * (thread + 1) / threads, share.scratch + thread * share.scratch_step);
    __tsan_release(&share.left);
}

}  // namespace

extern "C" {

// Kernels one after another, each cut in as many parts as there are threads. `scratch`: `scratch_step` bytes a thread.
void training_run(const Kernel* const* kernels, int64_t count, int64_t threads, char* scratch, int64_t scratch_step) {
    static const Parallel parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    static const ThreadNumber thread_number = (ThreadNumber)dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    static const ThreadNumber num_threads = (ThreadNumber)dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    for (int64_t i = 0; i < count; i++) {
        Share share{kernels[i], 0, scratch, scratch_step, thread_number, num_threads};
        const int64_t wanted = std::min(threads, kernels[i]->units);
        if (wanted > 1 && parallel && thread_number && num_threads) {
            __tsan_release(&share);
            parallel(run_share, &share, (unsigned)wanted, 0);
            __tsan_acquire(&share.left);
        } else {
            kernels[i]->run(0, kernels[i]->units, scratch);
        }
    }
}

Kernel* make_batch_norm_statistics(const BatchNorm* arguments) { return new BatchNormStatistics(*arguments); }
Kernel* make_batch_norm_finish(const Kernel* of) { return new Finished<BatchNormStatistics>((const BatchNormStatistics*)of); }
Kernel* make_batch_norm_apply(const BatchNorm* arguments) { return new BatchNormApply(*arguments); }
Kernel* make_batch_norm_gradient_sums(const BatchNormGradient* arguments) { return new BatchNormGradientSums(*arguments); }
Kernel* make_batch_norm_gradient_finish(const Kernel* of) {
    return new Finished<BatchNormGradientSums>((const BatchNormGradientSums*)of);
}
Kernel* make_batch_norm_gradient_apply(const Kernel* of) {
    return new BatchNormGradientApply((const BatchNormGradientSums*)of);
}

Kernel* make_depthwise_forward(const Depthwise* arguments) { return new DepthwiseImage<true>(*arguments); }
Kernel* make_depthwise_input_gradient(const Depthwise* arguments) { return new DepthwiseImage<false>(*arguments); }
Kernel* make_depthwise_weight_gradient(const Depthwise* arguments) { return new DepthwiseWeightGradient(*arguments); }
Kernel* make_depthwise_weight_finish(const Kernel* of) {
    return new Finished<DepthwiseWeightGradient>((const DepthwiseWeightGradient*)of);
}

Kernel* make_attention_forward(const TrainingAttention* arguments) { return new AttentionForward(*arguments); }
Kernel* make_attention_backward(const TrainingAttention* arguments) { return new AttentionBackward(*arguments); }

Kernel* make_gemm(const Gemm* arguments) { return new GemmKernel(*arguments); }
Kernel* make_weight_gradient(const WeightGradient* arguments) { return new WeightGradientKernel(*arguments); }
Kernel* make_layer_norm_forward(const TrainingLayerNorm* arguments) { return new LayerNormForward(*arguments); }
Kernel* make_layer_norm_backward(const TrainingLayerNorm* arguments) { return new LayerNormBackward(*arguments); }
Kernel* make_layer_norm_finish(const Kernel* of) { return new Finished<LayerNormBackward>((const LayerNormBackward*)of); }

Kernel* make_winograd2_weights(const WinogradWeights* arguments) { return new WinogradWeightsKernel<2>(*arguments); }
Kernel* make_winograd4_weights(const WinogradWeights* arguments) { return new WinogradWeightsKernel<4>(*arguments); }
Kernel* make_winograd2_weight_gradient(const WinogradGradient* arguments) { return new WinogradWeightGradient<2>(*arguments); }
Kernel* make_winograd4_weight_gradient(const WinogradGradient* arguments) { return new WinogradWeightGradient<4>(*arguments); }
Kernel* make_winograd2_weight_finish(const Kernel* of) {
    return new WinogradWeightFinish<2>((const WinogradWeightGradient<2>*)of);
}
Kernel* make_winograd4_weight_finish(const Kernel* of) {
    return new WinogradWeightFinish<4>((const WinogradWeightGradient<4>*)of);
}
}
MLSYS_FUNCTIONS(
    training_run, make_batch_norm_statistics, make_batch_norm_finish, make_batch_norm_apply,
    make_batch_norm_gradient_sums, make_batch_norm_gradient_finish, make_batch_norm_gradient_apply,
    make_depthwise_forward, make_depthwise_input_gradient, make_depthwise_weight_gradient,
    make_depthwise_weight_finish, make_attention_forward, make_attention_backward, make_gemm, make_weight_gradient,
    make_layer_norm_forward, make_layer_norm_backward, make_layer_norm_finish, make_winograd2_weights,
    make_winograd4_weights, make_winograd2_weight_gradient, make_winograd4_weight_gradient,
    make_winograd2_weight_finish, make_winograd4_weight_finish);

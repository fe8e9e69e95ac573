// C functions by which Python uses a kernel. Included once in each library.
#pragma once

#include <mlsys/vec.h>

#include "kernel.h"

extern "C" {
int32_t kernel_lanes() { return mlsys::LANES; }
int64_t kernel_units(const nimble::Kernel* kernel) { return kernel->units; }
int64_t kernel_scratch(const nimble::Kernel* kernel) { return kernel->scratch_nbytes; }
void kernel_run(const nimble::Kernel* kernel, int64_t begin, int64_t end, void* scratch) {
    if (kernel->scratch_nbytes) *(int64_t*)scratch = nimble::Kernel::NEW;
    kernel->run(begin, end, scratch);
}
void kernel_free(nimble::Kernel* kernel) { delete kernel; }
}
MLSYS_FUNCTIONS(kernel_lanes, kernel_units, kernel_scratch, kernel_run, kernel_free);

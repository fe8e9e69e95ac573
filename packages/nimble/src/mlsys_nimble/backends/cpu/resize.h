// Kernels and plans of a schedule at other sizes: write the changed arguments in place, make the kernels again, and
// give every worker the same share of their units.
#pragma once

#include <cstring>

#include "executor.h"

namespace nimble {

struct Write {  // write of one number into a kernel's arguments
    void* place;
    int32_t width;  // bytes: 8, or 4
    int32_t index;  // of its value
};
MLSYS_STRUCT(Write, place, width, index);

struct Recipe {  // how to make one kernel
    void* maker;  // of Kernel* (const void*)
    void* arguments;
};
MLSYS_STRUCT(Recipe, maker, arguments);

struct Share {  // one worker's share of one kernel
    int32_t worker, kernel, part, num_parts, first_wait, num_waits;
    int64_t grain;
};
MLSYS_STRUCT(Share, worker, kernel, part, num_parts, first_wait, num_waits, grain);

inline void write(const Write* writes, int64_t count, const int64_t* values) {
    for (const Write* each = writes; each < writes + count; each++) {
        const int64_t value = values[each->index];
        const int32_t low = (int32_t)value;
        std::memcpy(each->place, each->width == 8 ? (const void*)&value : &low, each->width);
    }
}

inline void make(const Recipe* recipes, int64_t count, Kernel** made) {
    for (int64_t i = 0; i < count; i++) made[i] = ((Kernel * (*)(const void*)) recipes[i].maker)(recipes[i].arguments);
}

inline Plan* plan_of(int workers, const Share* shares, int64_t count, const Kernel* const* kernels, const Wait* waits) {
    Plan* plan = new Plan(workers);
    for (const Share* each = shares; each < shares + count; each++) {
        const Kernel* kernel = kernels[each->kernel];
        const int64_t begin = kernel->units * each->part / each->num_parts, end = kernel->units * (each->part + 1) / each->num_parts;
        plan->add(each->worker, {kernel, begin, end, (int32_t)plan->waits.size(), each->num_waits, each->grain});
        plan->waits.insert(plan->waits.end(), waits + each->first_wait, waits + each->first_wait + each->num_waits);
    }
    return plan;
}

}  // namespace nimble

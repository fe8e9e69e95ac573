// The C interface of a decoder's program: what mlsys_orca.backends.native.library loads.

#include <cstring>

#include "lookup.h"
#include "program.h"

namespace orca {

template <class T>
void pack(const T* from, T* to, int N, int K, int panels, int stride, int first) {
    for (int panel = 0; panel < panels; panel++) {
        const T* at = from + (int64_t)panel * PANEL * K;
        pack_panel<PANEL>(
            to + (int64_t)(first + panel * stride) * K * PANEL, K, N - panel * PANEL,
            [&](int64_t k, int n) { return at[(int64_t)n * K + k]; });
    }
}

}  // namespace orca

extern "C" {

using orca::Program;

Program* orca_program(int threads, int spins, int num_registers, const int32_t* widths) {
    return new Program(threads, spins, num_registers, widths);
}
void orca_free(Program* program) { delete program; }
void orca_add_gemm(Program* program, const orca::Gemm* op) { program->operators.emplace_back(*op); }
void orca_add_attention(Program* program, const orca::Attention* op) { program->operators.emplace_back(*op); }
void orca_add_gather_rows(Program* program, const orca::GatherRows* op) { program->operators.emplace_back(*op); }
void orca_add_normalise(Program* program, const orca::Normalise* op) { program->operators.emplace_back(*op); }
void orca_add_reduce(Program* program, const orca::Reduce* op) { program->operators.emplace_back(*op); }
void orca_add_route(Program* program, const orca::Route* op) { program->operators.emplace_back(*op); }
void orca_add_grouped(Program* program, const orca::Grouped* op) { program->operators.emplace_back(*op); }
void orca_add_combine(Program* program, const orca::Combine* op) { program->operators.emplace_back(*op); }
void orca_add_convolve(Program* program, const orca::Convolve* op) { program->operators.emplace_back(*op); }
void orca_add_scan(Program* program, const orca::Scan* op) { program->operators.emplace_back(*op); }
void orca_add_gate(Program* program, const orca::Gate* op) { program->operators.emplace_back(*op); }

// A rank's view of the memory in which it meets the others; slots have `slot_size` floats.
orca::Meeting* orca_meeting(void* memory, int rank, int num_ranks, int64_t slot_size) {
    return new orca::Meeting(memory, rank, num_ranks, slot_size);
}
void orca_free_meeting(orca::Meeting* meeting) { delete meeting; }
void orca_join(Program* program, orca::Meeting* meeting) { program->join(meeting); }
void orca_abort(orca::Meeting* meeting) { meeting->abort(); }

// For who carries slots between hosts; the meeting is a view as the rank that is waited, or stood in, for.
int64_t orca_await(orca::Meeting* meeting, uint32_t number) { return meeting->await(number); }
void orca_arrive(orca::Meeting* meeting, uint32_t number, int64_t num_floats) { meeting->arrive(number, num_floats); }

// Meet: `size` floats of each rank are to be had by all. Returns the number of the first float of rank 0, counted from the
// first slot's; -1: aborted. Rank r's are r slots further on.
int64_t orca_exchange(orca::Meeting* meeting, const float* own, int64_t size) {
    const uint32_t number = meeting->next++;
    std::memcpy(meeting->slot(number, meeting->rank), own, size * sizeof(float));
    meeting->arrive(number, size);
    return meeting->wait(number) ? meeting->slot(number, 0) - meeting->slot(0, 0) : -1;
}

// Rows `ids` of a matrix in codes, [count][K]; returns how many were looked up before one that there is not.
int32_t orca_look_up(const orca::Codes* matrix, const int64_t* ids, int32_t count, float* out) {
    for (int32_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= matrix->rows) return i;
        orca::look_up(*matrix, ids[i], out + (int64_t)i * matrix->K);
    }
    return count;
}

// Whether this machine multiplies pairs of bf16 in one instruction.
int orca_has_pairs() { return orca::HAS_PAIRS; }

// Whether it has AMX, and the kernel lets us use it.
int orca_has_amx() { return orca::has_amx(); }

// Whether the cache of a model with heads of that size stands in pairs of bf16.
int orca_attends_in_pairs(int head_dim) { return orca::attends_in_pairs(head_dim); }

// Whether the program ran to its end: 0, where another rank is gone.
int orca_run(Program* program, const orca::Batch* batch) { return program->run(*batch); }

// Pack [N, K], row by row, as panels `first`, `first + stride`, ... of a packed matrix; missing columns are 0.
void orca_pack(const void* from, void* to, int size, int N, int K, int panels, int stride, int first) {
    if (size == 4) orca::pack((const uint32_t*)from, (uint32_t*)to, N, K, panels, stride, first);
    if (size == 2) orca::pack((const uint16_t*)from, (uint16_t*)to, N, K, panels, stride, first);
    if (size == 1) orca::pack((const uint8_t*)from, (uint8_t*)to, N, K, panels, stride, first);
}
}
MLSYS_FUNCTIONS(
    orca_program, orca_free, orca_add_gemm, orca_add_attention, orca_add_gather_rows, orca_add_normalise, orca_add_reduce,
    orca_add_route, orca_add_grouped, orca_add_combine, orca_add_convolve, orca_add_scan, orca_add_gate, orca_meeting,
    orca_free_meeting, orca_join, orca_abort, orca_await, orca_arrive, orca_exchange, orca_look_up, orca_has_pairs, orca_has_amx,
    orca_attends_in_pairs, orca_run, orca_pack);

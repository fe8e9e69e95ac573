// The C functions of mlsys_nimble.backends.cpu.replay: teams and plans.
#include "executor.h"
#include "resize.h"

using nimble::Kernel;
using nimble::Plan;
using nimble::Team;

extern "C" {

Team* nimble_team(int size, int spins) { return new Team(size, spins); }
void nimble_team_free(Team* team) { delete team; }

Plan* nimble_plan(int workers) { return new Plan(workers); }
void nimble_plan_free(Plan* plan) { delete plan; }

// `waits`: pairs of worker and count. Tasks of a worker are added in the order in which its list runs them.
void nimble_plan_add(
    Plan* plan, int worker, const Kernel* kernel, int64_t begin, int64_t end, int64_t grain, const nimble::Wait* waits,
    int num_waits) {
    plan->add(worker, {kernel, begin, end, (int32_t)plan->waits.size(), num_waits, grain});
    plan->waits.insert(plan->waits.end(), waits, waits + num_waits);
}

// Write `values[index[i]]` to each place of `width` bytes, 8 or 4.
void nimble_write(const nimble::Write* writes, int64_t count, const int64_t* values) { nimble::write(writes, count, values); }
// Make kernels of their arguments; `made` gets their addresses.
void nimble_make(const nimble::Recipe* recipes, int64_t count, void* made) { nimble::make(recipes, count, (Kernel**)made); }
void nimble_unmake(void* made, int64_t count) {
    for (int64_t i = 0; i < count; i++) delete ((Kernel**)made)[i];
}
Plan* nimble_plan_of(int workers, const nimble::Share* shares, int64_t count, const void* kernels, const nimble::Wait* waits) {
    return nimble::plan_of(workers, shares, count, (const Kernel* const*)kernels, waits);
}

void nimble_run(Team* team, Plan* plan) { team->run(*plan, nullptr); }
void nimble_run_timed(Team* team, Plan* plan, nimble::Times* times) { team->run(*plan, times); }
}
MLSYS_FUNCTIONS(
    nimble_team, nimble_team_free, nimble_plan, nimble_plan_free, nimble_plan_add, nimble_write, nimble_make, nimble_unmake,
    nimble_plan_of, nimble_run, nimble_run_timed);

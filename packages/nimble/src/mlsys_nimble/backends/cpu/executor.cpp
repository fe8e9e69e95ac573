// What mlsys_nimble.backends.cpu.executor loads: teams, plans, and the time of a kernel by itself.
#include "executor.h"

#include <algorithm>

using nimble::Kernel;
using nimble::Plan;
using nimble::Team;

extern "C" {

Team* nimble_team(int size, int spins) { return new Team(size, spins); }
void nimble_team_free(Team* team) { delete team; }

Plan* nimble_plan(int workers) { return new Plan(workers); }
void nimble_plan_free(Plan* plan) { delete plan; }

// `waits`: pairs of worker and count. Tasks of a worker are added in the order it runs them.
void nimble_plan_add(
    Plan* plan, int worker, const Kernel* kernel, int64_t begin, int64_t end, const nimble::Wait* waits, int num_waits) {
    plan->lists[worker].push_back({kernel, begin, end, (int32_t)plan->waits.size(), num_waits});
    plan->waits.insert(plan->waits.end(), waits, waits + num_waits);
    plan->scratch_nbytes = std::max(plan->scratch_nbytes, kernel->scratch_nbytes);
}

void nimble_run(Team* team, const Plan* plan) { team->run(*plan, nullptr); }
void nimble_run_timed(Team* team, const Plan* plan, nimble::Times* times) { team->run(*plan, times); }
}

// Replays of random graphs under the thread sanitiser: `make sanitize` builds and runs it. Each kernel adds up its producers'
// plain arrays, so a missing wait is a data race, and a wrong one a wrong sum.
#include <cstdio>
#include <random>

#include "executor.h"

using namespace nimble;

constexpr int UNITS = 8;

class Adding : public Kernel {
  public:
    Adding(std::vector<const long*> sources, long* result) : sources(std::move(sources)), result(result) { units = UNITS; }
    void run(int64_t begin, int64_t end, void*) const override {
        for (int64_t unit = begin; unit < end; unit++) {
            long total = 1;
            for (const long* source : sources)
                for (int i = 0; i < UNITS; i++) total += source[i];
            result[unit] = total % 1000003;
        }
    }

  private:
    std::vector<const long*> sources;
    long* result;
};

int main() {
    std::mt19937 random(0);
    for (int graph = 0; graph < 40; graph++) {
        const int workers = 1 + graph % 4, jobs = 30;
        std::vector<std::vector<long>> results(jobs, std::vector<long>(UNITS)), wanted = results;
        std::vector<std::unique_ptr<Adding>> kernels;
        std::vector<std::vector<int>> needed(jobs);
        std::vector<std::vector<Wait>> spots(jobs);
        Plan plan(workers);
        for (int job = 0; job < jobs; job++) {
            std::vector<const long*> sources;
            for (int other = 0; other < job; other++)
                if (random() % 8 == 0) {
                    needed[job].push_back(other);
                    sources.push_back(results[other].data());
                }
            kernels.push_back(std::make_unique<Adding>(sources, results[job].data()));
            const bool is_cut = random() % 2;
            const int alone = random() % workers;
            for (int worker = 0; worker < workers; worker++) {
                if (!is_cut && worker != alone) continue;
                const int first = plan.waits.size();
                for (int other : needed[job])
                    for (const Wait& spot : spots[other])
                        if (spot.worker != worker) plan.waits.push_back(spot);
                const int64_t begin = is_cut ? UNITS * worker / workers : 0;
                const int64_t end = is_cut ? UNITS * (worker + 1) / workers : UNITS;
                plan.add(worker, {kernels[job].get(), begin, end, first, (int)plan.waits.size() - first, 1 + (int64_t)random() % UNITS});
                spots[job].push_back({worker, (int)plan.lists[worker].size()});
            }
        }
        for (int job = 0; job < jobs; job++) kernels[job]->run(0, UNITS, nullptr);
        wanted = results;
        Team team(workers, graph % 2 ? 0 : 200);  // those that sleep at once, and those that spin
        for (int replay = 0; replay < 200; replay++) {
            for (auto& result : results) std::fill(result.begin(), result.end(), -1);
            team.run(plan, nullptr);
            if (results != wanted) {
                std::printf("graph %d, replay %d: wrong sums\n", graph, replay);
                return 1;
            }
        }
    }
    // Short replays, one right after the other: helpers come late, and leave while the next one begins.
    std::vector<long> first(UNITS), second(UNITS);
    Adding one({}, first.data()), two({first.data()}, second.data());
    for (int workers = 2; workers <= 4; workers++) {
        Plan plan(workers);
        plan.waits = {{1, 1}};
        plan.add(0, {&one, 0, UNITS / 2, 0, 0, 1});
        plan.add(1, {&one, UNITS / 2, UNITS, 0, 0, 1});
        plan.add(0, {&two, 0, UNITS, 0, 1, 1});
        Times times[3];
        Team team(workers, 200);
        for (int replay = 0; replay < 20000; replay++) {
            std::fill(second.begin(), second.end(), -1);
            team.run(plan, times);
            if (second != std::vector<long>(UNITS, UNITS + 1)) {
                std::printf("%d workers, short replay %d: wrong sums\n", workers, replay);
                return 1;
            }
        }
    }
    std::puts("40 graphs, 8,000 replays: right sums");
    return 0;
}

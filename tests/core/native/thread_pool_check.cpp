// The thread pool by itself: loops of random lengths, on pools of one to six threads, with and without spinning; and the
// shared pool, called from several threads. `make sanitize` runs it under the thread sanitiser.
#include <mlsys/thread_pool.h>

#include <cstdio>
#include <numeric>
#include <random>

using namespace mlsys;

struct Loops {
    ThreadPool& pool;
    std::vector<std::vector<long>>& rows;  // each is computed from the sum of the one before it
};

static void run_loops(void* context, int thread) {
    Loops& loops = *(Loops*)context;
    for (size_t row = 1; row < loops.rows.size(); row++)
        loops.pool.for_each(thread, (int)loops.rows[row].size(), [&](int i) {
            const std::vector<long>& before = loops.rows[row - 1];
            loops.rows[row][i] += std::accumulate(before.begin(), before.end(), 1L) % 10007;
        });
}

static bool loops_are_right(int size, int spins, std::mt19937& random) {
    ThreadPool pool(size, spins);
    for (int run = 0; run < 200; run++) {
        std::vector<std::vector<long>> rows(2 + random() % 12);
        for (auto& row : rows) row.assign(random() % 4 ? random() % 40 : 0, 0);
        std::iota(rows[0].begin(), rows[0].end(), 1);
        auto wanted = rows;
        for (size_t row = 1; row < rows.size(); row++) {
            const long sum = std::accumulate(wanted[row - 1].begin(), wanted[row - 1].end(), 1L) % 10007;
            for (long& each : wanted[row]) each = sum;
        }
        Loops loops{pool, rows};
        pool.run(run_loops, &loops);
        if (rows != wanted) return false;
    }
    return true;
}

static long shared_sum(int threads) {
    std::atomic<int> next{0};
    std::atomic<long> sum{0};
    SharedPool::run(threads, [&] {
        for (int i; (i = next++) < 1000;) sum += i;
    });
    return sum;
}

int main() {
    std::mt19937 random(0);
    for (int size = 1; size <= 6; size++)
        for (int spins : {0, 50, 2000})
            if (!loops_are_right(size, spins, random)) {
                std::printf("%d threads, %d spins: wrong sums\n", size, spins);
                return 1;
            }
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; caller++)
        callers.emplace_back([&, caller] {
            for (int i = 0; i < 300; i++) wrong += shared_sum(1 + (i + caller) % 4) != 499500;
        });
    for (std::thread& caller : callers) caller.join();
    std::puts(wrong ? "the shared pool: wrong sums" : "right sums");
    return wrong != 0;
}

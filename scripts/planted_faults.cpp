// Faults that scripts/sanitize.py demands to see reported before it believes that there are none elsewhere.
#include <cstdint>
#include <cstdlib>
#include <thread>

static volatile int kept;
static int shared;

extern "C" {

void address_0() {  // reads beyond an allocation
    int* values = (int*)std::malloc(10 * sizeof(int));
    for (int i = 0; i < 10; i++) values[i] = i;
    volatile int at = 10;
    kept = values[at];
    std::free(values);
}

void address_1() {  // loses one
    int* volatile values = (int*)std::malloc(4000);
    values[0] = 1;
    values = nullptr;
}

void undefined_0() {
    volatile int32_t largest = INT32_MAX;
    kept = largest + 1;
}

void undefined_1() {
    volatile float infinite = 1e30f;
    kept = (int32_t)infinite;
}

void thread_0() {
    std::thread other([] { shared = shared + 1; });
    shared = shared + 1;
    other.join();
    kept = shared;
}

}  // extern "C"

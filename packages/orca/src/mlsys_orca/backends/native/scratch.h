// Memory that is kept from one use to the next.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace orca {

// Floats that begin with a line of the cache, so that no vector of whole rows lies across two.
class Scratch {
  public:
    // At least `size` of them; what they held is lost where there were fewer.
    float* grow(int64_t size) {
        if (size > room) {
            room = (size + LINE - 1) / LINE * LINE;
            floats.reset((float*)std::aligned_alloc(LINE * sizeof(float), room * sizeof(float)));
            if (!floats) throw std::bad_alloc();
        }
        return floats.get();
    }

  private:
    static constexpr int64_t LINE = 64 / sizeof(float);
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> floats;
    int64_t room = 0;
};

}  // namespace orca

// Digests of bytes, read at the speed of memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace nimble {

using Block = uint64_t __attribute__((vector_size(64)));  // compilers split it where vectors are narrower

inline uint64_t mixed(uint64_t state, uint64_t value) {  // SplitMix64 (Steele et al. 2014)
    state = (state ^ value) + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    return state ^ (state >> 31);
}

// Fletcher's two sums over words of 64 bits, eight columns side by side: the second weighs each word by its place.
struct Sums {
    Block sum{}, weighted{};

    void read(const char* data, int64_t nbytes) {
        Block words;
        int64_t at = 0;
        for (; at + (int64_t)sizeof(Block) <= nbytes; at += sizeof(Block)) {
            std::memcpy(&words, data + at, sizeof words);
            sum += words;
            weighted += sum;
        }
        words = Block{};
        std::memcpy(&words, data + at, nbytes - at);
        sum += words;
        weighted += sum;
    }

    uint64_t into(uint64_t state, int64_t nbytes) const {
        state = mixed(state, nbytes);
        for (int lane = 0; lane < 8; lane++) state = mixed(mixed(state, sum[lane]), weighted[lane]);
        return state;
    }
};
}  // namespace nimble

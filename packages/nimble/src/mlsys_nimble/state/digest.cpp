// Digests of memory, for noticing that bytes have changed; read at the speed of memory.
#include <cstdint>
#include <cstring>

namespace {

using Block = uint64_t __attribute__((vector_size(64)));  // compilers split it where vectors are narrower

uint64_t mixed(uint64_t state, uint64_t value) {  // SplitMix64 (Steele et al. 2014)
    state = (state ^ value) + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    return state ^ (state >> 31);
}

// Fletcher's two sums over words of 64 bits, eight columns side by side: the second weighs each word by its place.
uint64_t digest(uint64_t state, const char* data, int64_t nbytes) {
    Block sum{}, weighted{};
    int64_t at = 0;
    for (; at + (int64_t)sizeof(Block) <= nbytes; at += sizeof(Block)) {
        Block words;
        std::memcpy(&words, data + at, sizeof words);
        sum += words;
        weighted += sum;
    }
    Block rest{};
    std::memcpy(&rest, data + at, nbytes - at);
    sum += rest;
    weighted += sum;
    state = mixed(state, nbytes);
    for (int lane = 0; lane < 8; lane++) state = mixed(mixed(state, sum[lane]), weighted[lane]);
    return state;
}

}  // namespace

extern "C" uint64_t nimble_digest(const void* const* pointers, const int64_t* nbytes, int64_t count) {
    uint64_t state = count;
    for (int64_t piece = 0; piece < count; piece++) state = digest(state, (const char*)pointers[piece], nbytes[piece]);
    return state;
}

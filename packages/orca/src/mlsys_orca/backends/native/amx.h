// GEMM of bf16 pairs by AMX: 16 rows by 16 columns by 32 features in one instruction.
//
// A packed panel of pairs is as AMX wants it: 32 features of 16 columns are 16 lines of 64 bytes. Each element of
// the result is summed over steps of 32 features from first to last (of a slice), whatever the rows beside it.
#pragma once

#include <algorithm>

#include "weights.h"

#if MLSYS_LANES == 16 && defined(__AMX_BF16__) && defined(__linux__)
#define ORCA_HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define ORCA_HAS_AMX 0
#endif

namespace orca {

constexpr int AMX_TILE_ROWS = 16;  // of a tile register; memory that is read holds as many, whatever is in them
constexpr int AMX_K = 32;  // features of a step
constexpr int AMX_MR = 2 * AMX_TILE_ROWS;  // rows that are multiplied together

// Prefetches what is read after the present panels, a few lines a step, into the second-level cache.
struct Prefetch {
    const char* next = nullptr;
    int lines = 0;  // of 64 bytes, a step
    void step() {
        for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * 64, 0, 2);
        next += lines * 64;
    }
};

#if ORCA_HAS_AMX

// The kernel grants a process the tile registers on request.
inline bool has_amx() {
    static const bool granted = [] {
        constexpr long ASK_FOR = 0x1023, REGISTERS = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, ASK_FOR, REGISTERS) == 0;
    }();
    return granted;
}

// The tile registers of the calling thread, while this lives. Four hold sums; what the others hold depends on
// what is multiplied.
class AmxTiles {
  public:
    ~AmxTiles() {
        if (has_amx()) _tile_release();
    }
    // 4, 5: rows by 32 features; 6, 7: 32 features by columns.
    void for_gemm() { configure(64, 16); }
    // As those, but 6: rows by 16 keys; 7: 16 keys by columns.
    void for_attention() { configure(32, 8); }

  private:
    static void configure(uint16_t bytes_of_6, uint8_t lines_of_7) {
        if (!has_amx()) return;
        struct alignas(64) {
            uint8_t palette = 1, rest[15] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        shapes.bytes[6] = bytes_of_6;
        shapes.lines[7] = lines_of_7;
        _tile_loadconfig(&shapes);
    }
};

// Two panels as they stand.
struct StoredPanels {
    const uint16_t* panels[2];
    const uint16_t* at(int which, int step) const { return panels[which] + (int64_t)step * AMX_K * PANEL; }
};

// Two panels that are decoded step by step, while AMX multiplies the step before: for rows that pass but once.
template <class Panel>
struct DecodedPanels {
    const Panel panels[2];
    const int group_size;
    uint16_t* const scratch;  // of 8 steps
    const uint16_t* at(int which, int step) const {
        uint16_t* to = scratch + (step % 4 * 2 + which) * AMX_K * PANEL;
        decode_pairs(panels[which], step * AMX_K, (step + 1) * AMX_K, group_size, to);
        return to;
    }
};

// 32 or 16 rows of `a`, `lda` pairs apart, times two panels, into sums [rows][32]; prefetches meanwhile.
template <bool BOTH, class Panels>
inline void multiply_tiles(const uint32_t* a, int64_t lda, const Panels& panels, int K, Prefetch prefetch, float* sums) {
    constexpr int WIDTH = 2 * PANEL;  // floats of a line
    const int64_t line = lda * 4;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < K / AMX_K; step++) {
        const uint32_t* from = a + step * AMX_K / 2;
        prefetch.step();
        _tile_loadd(4, from, line);
        _tile_loadd(6, panels.at(0, step), 64);
        _tile_loadd(7, panels.at(1, step), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            _tile_loadd(5, from + AMX_TILE_ROWS * lda, line);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, WIDTH * 4);
    _tile_stored(1, sums + PANEL, WIDTH * 4);
    if constexpr (BOTH) {
        _tile_stored(2, sums + AMX_TILE_ROWS * WIDTH, WIDTH * 4);
        _tile_stored(3, sums + AMX_TILE_ROWS * WIDTH + PANEL, WIDTH * 4);
    }
}

#else

struct StoredPanels {
    const uint16_t* panels[2];
};
template <class Panel>
struct DecodedPanels {
    const Panel panels[2];
    int group_size;
    uint16_t* scratch;
};
inline bool has_amx() { return false; }
struct AmxTiles {
    void for_gemm() {}
    void for_attention() {}
};
template <bool BOTH, class Panels>
inline void multiply_tiles(const uint32_t*, int64_t, const Panels&, int, Prefetch, float*) {}

#endif

// Up to 32 rows of pairs, `lda` pairs apart, times two panels of K features, into sums [rows][32]. Of `a` and
// of `sums` whole tiles of AMX_TILE_ROWS rows are read and written.
template <class Panels>
inline void multiply_by_amx(
    const Panels& panels, int K, int M, const uint32_t* a, int64_t lda, float* sums, Prefetch prefetch = {}) {
    if (M > AMX_TILE_ROWS)
        multiply_tiles<true>(a, lda, panels, K, prefetch, sums);
    else
        multiply_tiles<false>(a, lda, panels, K, prefetch, sums);
}

}  // namespace orca

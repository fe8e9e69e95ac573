// Packed weights: layout of a matrix [N, K] in memory, and how a row of a panel is read. A *panel* is 16 output
// columns; inside it the 16 weights of one input feature are adjacent, so that a GEMM reads each panel from end to end.
// Every kind decodes to the same fp32 number wherever it is read, so a GEMM's value does not depend on the loop that
// computed it.
#pragma once

#include <algorithm>

#include <mlsys/gemm.h>

#include "vec.h"

namespace orca {

constexpr int PREFETCH_NBYTES = 2048;  // of a panel, ahead of what is read

// Whether this machine multiplies pairs of bf16 in one instruction.
#if MLSYS_LANES == 16 && defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Those in quads come last: integer.h.
MLSYS_ENUM(
    Kind, F32, BF16, INT8, INT4, BF16_PAIRS, INT8_QUADS, INT2_QUADS, INT3_QUADS, INT4_QUADS, INT5_QUADS, INT6_QUADS);

// A packed matrix as Python describes it, through ctypes.
struct Matrix {
    Kind kind;
    int32_t N;            // output features
    int32_t K;            // input features
    int32_t group_size;   // input features that share a scale; codes
    const void* codes;    // packed weights
    const void* scales;   // [panels, K / group_size, 16], codes: weight = scale * (code - centre) + offset
    const void* offsets;  // shape and dtype of `scales`; null: 0
    // fp16 [panels, K / block_size, 16]: scales are int8, in units of these; null: scales and offsets are floating
    const void* factors;
    const void* offset_factors;  // factors of the offsets, same shape
    int32_t block_size;          // input features that share a factor; whole numbers are summed over them
    int32_t has_halves;          // scales and offsets are fp16, else fp32
    int32_t takes_bf16;          // int8 and int4: rows and decoded weights may be rounded to bf16
    int32_t centre;              // of codes of 3 to 6 bits
    int32_t panels() const { return (N + PANEL - 1) / PANEL; }
    bool is_in_quads() const { return kind >= INT8_QUADS; }
    // Features of a quantised row that share a scale.
    int scaled_together() const { return factors ? block_size : group_size; }
    bool is_in_pairs() const {
        return kind == BF16_PAIRS || (HAS_PAIRS && takes_bf16 && group_size % 2 == 0 && !is_in_quads());
    }
};
MLSYS_STRUCT(
    Matrix, kind, N, K, group_size, codes, scales, offsets, factors, offset_factors, block_size, has_halves, takes_bf16,
    centre);

// Input features of a product that are summed together: all of them, or one slice.
struct Features {
    int begin, size;
};

// A panel is read a step at a time, STEP rows at once, with what its group of rows shares (`Group`) in registers. It may
// begin with a later row, `begin`, of which the rows after it are counted: where a slice of the features is multiplied.
template <class T>
struct FloatPanel {
    static constexpr int STEP = 1;
    struct Group {};
    const T* weights;
    const T* prefetch_from = nullptr;  // a panel elsewhere that is read next; null: what follows this one
    FloatPanel(const Matrix& m, int panel, int begin = 0)
        : weights((const T*)m.codes + ((int64_t)panel * m.K + begin) * PANEL) {}
    explicit FloatPanel(const T* weights, const T* prefetch_from = nullptr) : weights(weights), prefetch_from(prefetch_from) {}
    Group group(int) const { return {}; }
    void read(int row, const Group&, vf (&out)[1][VECS]) const {
        for (int v = 0; v < VECS; v++) out[0][v] = load(weights + (int64_t)row * PANEL + v * LANES);
    }
    void prefetch(int row) const {
        __builtin_prefetch((prefetch_from ? prefetch_from : weights + PREFETCH_NBYTES / sizeof(T)) + (int64_t)row * PANEL, 0, 2);
    }
};
using F32Panel = FloatPanel<float>;
struct NearPanel : F32Panel {  // in the first-level cache already; what is read later waits in the second-level one
    NearPanel() : F32Panel(nullptr) {}
    void prefetch(int row) const { __builtin_prefetch(prefetch_from + (int64_t)row * PANEL, 0, 2); }
};
using Bf16Panel = FloatPanel<uint16_t>;

// Two rows beside each other, [K / 2][16][2]: for the instruction that multiplies pairs of bf16 by pairs. The input's
// rows are rounded to bf16 as well.
struct PairsPanel {
    const uint16_t* weights;
    PairsPanel(const Matrix& m, int panel, int begin = 0)
        : weights((const uint16_t*)m.codes + ((int64_t)panel * m.K + begin) * PANEL) {}
    vu read(int pair, int v) const { return load_as<vu>(weights + ((int64_t)pair * PANEL + v * LANES) * 2); }
    void prefetch(int pair, int64_t ahead) const { __builtin_prefetch(weights + ahead + (int64_t)pair * PANEL * 2, 0, 2); }
};

// weight = scale * code + offset, rounded once.
struct Scaled {
    vf scale[VECS], offset[VECS];
    vf decode(vf code, int v) const { return fma(scale[v], code, offset[v]); }
};

struct Scales {
    const char* scales;
    const char* offsets;
    const uint16_t* factors = nullptr;
    const uint16_t* offset_factors = nullptr;
    const bool has_halves;
    const int centre;  // serves as an offset, so that none is stored
    int log_groups = 0;  // of a block
    const int64_t next_groups;  // bytes to the same group in the next tile of two panels
    Scales(const Matrix& m, int panel, int begin)
        : has_halves(m.has_halves), centre(m.is_in_quads() ? 0 : m.centre),
          next_groups(2 * (int64_t)(m.K / m.group_size) * PANEL * (m.factors ? 1 : m.has_halves ? 2 : 4)) {
        if (m.factors) {
            const int64_t block = ((int64_t)panel * (m.K / m.block_size) + begin / m.block_size) * PANEL;
            factors = (const uint16_t*)m.factors + block;
            if (m.offset_factors) offset_factors = (const uint16_t*)m.offset_factors + block;
            log_groups = __builtin_ctz(m.block_size / m.group_size);
        }
        const int64_t first = ((int64_t)panel * (m.K / m.group_size) + begin / m.group_size) * row_size();
        scales = (const char*)m.scales + first;
        offsets = m.offsets ? (const char*)m.offsets + first : nullptr;
    }
    // Inline always: a call in a kernel's loop spills every sum that its registers hold.
    MLSYS_INLINE Scaled group(int number) const {
        if (!factors) return floating_group(number);
        Scaled out;
        const int64_t row = (int64_t)number * PANEL, block = (int64_t)(number >> log_groups) * PANEL;
        for (int v = 0; v < VECS; v++) {
            const int64_t lane = v * LANES;
            out.scale[v] = load((const int8_t*)scales + row + lane) * load_halves(factors + block + lane);
            out.offset[v] = offsets ? load((const int8_t*)offsets + row + lane) * load_halves(offset_factors + block + lane)
                                    : from_centre(out.scale[v]);
        }
        return out;
    }
    // As `group`, where there are no factors.
    MLSYS_INLINE Scaled floating_group(int number) const {
        Scaled out;
        for (int v = 0; v < VECS; v++) {
            out.scale[v] = read_row(scales + number * row_size(), v);
            out.offset[v] = offsets ? read_row(offsets + number * row_size(), v) : from_centre(out.scale[v]);
        }
        return out;
    }

    MLSYS_INLINE void prefetch_group(int64_t number) const {
        const int64_t at = number * row_size() + next_groups;
        __builtin_prefetch(scales + at, 0, 2);
        if (offsets) __builtin_prefetch(offsets + at, 0, 2);
    }

  private:
    int64_t row_size() const { return PANEL * (factors ? 1 : has_halves ? 2 : 4); }
    MLSYS_INLINE vf from_centre(vf scale) const { return splat((float)-centre) * scale; }
    MLSYS_INLINE vf read_row(const char* from, int v) const {
        return has_halves ? load_halves((const uint16_t*)from + v * LANES) : load((const float*)from + v * LANES);
    }
};

struct Int8Panel : Scales {
    static constexpr int STEP = 1;
    using Group = Scaled;
    const int8_t* codes;
    Int8Panel(const Matrix& m, int panel, int begin = 0)
        : Scales(m, panel, begin), codes((const int8_t*)m.codes + ((int64_t)panel * m.K + begin) * PANEL) {}
    void read(int64_t row, const Group& group, vf (&out)[1][VECS]) const {
        for (int v = 0; v < VECS; v++) out[0][v] = group.decode(load(codes + row * PANEL + v * LANES), v);
    }
    void prefetch(int64_t row) const { __builtin_prefetch(codes + PREFETCH_NBYTES + row * PANEL); }
};

// Two rows share their bytes: the even row has the low halves. Codes are 0 to 15.
struct Int4Panel : Scales {
    static constexpr int STEP = 2;
    using Group = Scaled;
    const uint8_t* codes;
    Int4Panel(const Matrix& m, int panel, int begin = 0)
        : Scales(m, panel, begin), codes((const uint8_t*)m.codes + ((int64_t)panel * m.K + begin) / 2 * PANEL) {}
    void read(int64_t row, const Group& group, vf (&out)[2][VECS]) const {
        for (int v = 0; v < VECS; v++) {
            const vu bytes = load_bytes(codes + (row >> 1) * PANEL + v * LANES);
            out[0][v] = group.decode(__builtin_convertvector((vi)(bytes & 15), vf), v);
            out[1][v] = group.decode(__builtin_convertvector((vi)(bytes >> 4), vf), v);
        }
    }
    void prefetch(int64_t row) const { __builtin_prefetch(codes + PREFETCH_NBYTES + (row >> 1) * PANEL); }
};

#if MLSYS_LANES == 16 && defined(__AVX512BF16__)
// Features `k` and `k + 1` of a panel of codes as PairsPanel has them: decoded, then rounded to bf16.
template <class Panel>
inline vu read_pair(const Panel& panel, int64_t k, const typename Panel::Group& shared) {
    alignas(64) static constexpr uint16_t BESIDE[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    vf rows[2][VECS];
    if constexpr (Panel::STEP == 2) {
        panel.read(k, shared, rows);
    } else {
        panel.read(k, shared, reinterpret_cast<vf(&)[1][VECS]>(rows[0]));
        panel.read(k + 1, shared, reinterpret_cast<vf(&)[1][VECS]>(rows[1]));
    }
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(rows[1][0], rows[0][0]);
    return (vu)_mm512_permutexvar_epi16(_mm512_load_si512(BESIDE), apart);
}
#else
template <class Panel>
inline vu read_pair(const Panel&, int64_t, const typename Panel::Group&) {
    return vu{};
}
#endif

// Decode features `begin` to `end` of a panel of codes to pairs, as PairsPanel has them.
template <class Panel>
inline void decode_pairs(const Panel& panel, int begin, int end, int group_size, uint16_t* out) {
    for (int k = begin; k < end;) {
        const auto shared = panel.group(k / group_size);
        for (const int stop = std::min(end, (k / group_size + 1) * group_size); k < stop; k += 2) {
            panel.prefetch(k);
            const vu pairs = read_pair(panel, k, shared);
            std::memcpy(out + (int64_t)(k - begin) * PANEL, &pairs, sizeof pairs);
        }
    }
}

}  // namespace orca

// Sums of tree leaves for many rows: the native twin of mlsys_windtunnel.modules.tree_walk.
//
// Rows walk one tree side by side, so that the loads of one row's step hide behind the others' (eight rows an instruction
// where the CPU has AVX-512). The children of a split stand side by side, the right one first; a leaf leads to itself.
// Sums run over trees in order, as the sources add, and nothing is contracted: answers are the sources' to the last bit.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kRowsPerBlock = 64;
constexpr int32_t kMissingLeft = INT32_MIN;  // the sign bit of `feature`: NaN goes left

struct Node {
  double threshold;     // NaN at leaves: no value is below it
  int32_t feature;      // with kMissingLeft
  int32_t first_child;  // the right one; the left one is next. A leaf's is itself
};

struct Ensemble {
  const Node* nodes;
  const int32_t* root;       // [trees]
  const int32_t* depth;      // [trees]
  const int32_t* set_start;  // [nodes] of categorical splits: their bytes in `member`
  const int32_t* set_size;   // [nodes] 0: numeric
  const uint8_t* member;     // whether a code goes left; the last byte of a set is for all codes it does not hold
  const double* leaf_value;  // [nodes, outputs]
  int64_t num_trees, num_outputs, num_groups;
};

template <bool kCategories>
inline int32_t step(const Ensemble& e, int32_t place, const double* x) {
  const Node& node = e.nodes[place];
  const double value = x[node.feature & ~kMissingLeft];
  const bool missing_left = node.feature < 0;
  if (kCategories && e.set_size[place] > 0) {
    if (std::isnan(value)) return node.first_child + missing_left;
    const int64_t last = e.set_size[place] - 1;
    const double code = std::trunc(value);
    const int64_t entry = code >= 0 && code < static_cast<double>(last) ? static_cast<int64_t>(code) : last;
    return node.first_child + e.member[e.set_start[place] + entry];
  }
  return node.first_child + ((value <= node.threshold) | ((value != value) & missing_left));
}

template <bool kCategories>
void walk(const Ensemble& e, int64_t tree, const double* x, int64_t num_features, int64_t num_rows, int32_t* place) {
  std::fill_n(place, num_rows, e.root[tree]);
  for (int32_t level = 0; level < e.depth[tree]; ++level) {
    for (int64_t row = 0; row < num_rows; ++row) place[row] = step<kCategories>(e, place[row], x + row * num_features);
  }
}

#if defined(__AVX512F__)
// Four vectors of eight rows; ends when no row of them moved.
void walk_32(const Ensemble& e, int64_t tree, const double* x, int64_t num_features, int32_t* place) {
  const double* nodes = reinterpret_cast<const double*>(e.nodes);  // two to a node
  const __m512i offsets = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(num_features));
  const __m512i feature_mask = _mm512_set1_epi64(INT32_MAX);
  __m512i at[4];
  for (auto& places : at) places = _mm512_set1_epi64(e.root[tree]);
  for (int32_t level = 0; level < e.depth[tree]; ++level) {
    __mmask8 moved = 0;
    for (int group = 0; group < 4; ++group) {
      const __m512i twice = _mm512_slli_epi64(at[group], 1);
      const __m512d threshold = _mm512_i64gather_pd(twice, nodes, 8);
      const __m512i packed = _mm512_i64gather_epi64(twice, nodes + 1, 8);  // feature below, first child above
      const __m512i column = _mm512_and_si512(packed, feature_mask);
      const __m512d value =
          _mm512_i64gather_pd(_mm512_add_epi64(column, offsets), x + group * 8 * num_features, 8);
      const __mmask8 missing_left = _mm512_test_epi64_mask(packed, _mm512_set1_epi64(int64_t{1} << 31));
      const __mmask8 left = _mm512_cmp_pd_mask(value, threshold, _CMP_LE_OQ) |
                            (_mm512_cmp_pd_mask(value, value, _CMP_UNORD_Q) & missing_left);
      const __m512i child = _mm512_srli_epi64(packed, 32);
      const __m512i next = _mm512_mask_add_epi64(child, left, child, _mm512_set1_epi64(1));
      moved |= _mm512_cmpneq_epi64_mask(next, at[group]);
      at[group] = next;
    }
    if (!moved) break;
  }
  for (int group = 0; group < 4; ++group) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place + group * 8), _mm512_cvtepi64_epi32(at[group]));
  }
}
#endif

template <bool kCategories>
void find_leaves(const Ensemble& e, int64_t tree, const double* x, int64_t num_features, int64_t num_rows,
                 int32_t* place) {
#if defined(__AVX512F__)
  if (!kCategories) {
    for (; num_rows >= 32; num_rows -= 32, x += 32 * num_features, place += 32) walk_32(e, tree, x, num_features, place);
  }
#endif
  walk<kCategories>(e, tree, x, num_features, num_rows, place);
}

template <bool kCategories>
void run_block(const Ensemble& e, const double* x, int64_t num_features, int64_t num_rows, const double* bias,
               double divisor, double* out) {
  const int64_t width = e.num_groups > 1 ? e.num_groups : e.num_outputs;
  int32_t place[kRowsPerBlock];
  for (int64_t tree = 0; tree < e.num_trees; ++tree) {
    find_leaves<kCategories>(e, tree, x, num_features, num_rows, place);
    const int64_t group = e.num_groups > 1 ? tree % e.num_groups : 0;
    const bool is_first = tree < e.num_groups;
    for (int64_t row = 0; row < num_rows; ++row) {
      const double* value = e.leaf_value + place[row] * e.num_outputs;
      double* sum = out + row * width + group;
      for (int64_t output = 0; output < e.num_outputs; ++output) {
        // the bias joins the first tree's value, as the form in torch and the sources add it
        sum[output] = is_first ? value[output] + (bias ? bias[group + output] : 0.0) : sum[output] + value[output];
      }
    }
  }
  if (divisor != 1.0) {
    for (int64_t i = 0; i < num_rows * width; ++i) out[i] /= divisor;
  }
}

}  // namespace

extern "C" {

// x: [rows, features] row-major; out: [rows, outputs or groups]. Blocks are claimed one by one, so a thread that is held
// up holds up nobody.
void mlsys_sum_trees(const void* nodes, const int32_t* root, const int32_t* depth, const int32_t* set_start,
                     const int32_t* set_size, const uint8_t* member, const double* leaf_value, int64_t num_trees,
                     int64_t num_outputs, int64_t num_groups, int32_t has_categories, const double* bias, double divisor,
                     const double* x, int64_t num_rows, int64_t num_features, int32_t num_threads, double* out) {
  const Ensemble e{static_cast<const Node*>(nodes), root,       depth,     set_start,   set_size,
                   member, leaf_value, num_trees, num_outputs, num_groups};
  const int64_t width = num_groups > 1 ? num_groups : num_outputs;
  const int64_t num_blocks = (num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t block; (block = next.fetch_add(1)) < num_blocks;) {
      const int64_t start = block * kRowsPerBlock, count = std::min(kRowsPerBlock, num_rows - start);
      const auto run = has_categories ? run_block<true> : run_block<false>;
      run(e, x + start * num_features, num_features, count, bias, divisor, out + start * width);
    }
  };
  std::vector<std::thread> helpers;
  const int64_t num_helpers = std::min<int64_t>(num_threads - 1, num_blocks / 4);
  for (int64_t i = 0; i < num_helpers; ++i) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
}
}

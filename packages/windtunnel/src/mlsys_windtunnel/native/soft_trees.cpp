// Soft trees, fused: from what splits compare to the sum of leaves, and back, a tree and 64 rows at a time in the cache.
//
// Forward and backward compute the same splits and leaf weights; the backward pass computes them again, since that takes
// less time than keeping them in memory. Trees are divided into parts in a fixed way, and each part adds up its own, so that
// the same number of threads gives the same bits. A tree whose literals are not trained adds its path sums from
// parents to children: two additions a split where a GEMM with the literals takes as many as there are leaves.

#include <mlsys/layout.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include <mlsys/math.h>
#include <mlsys/thread_pool.h>

namespace {

constexpr int64_t kRows = 64;  // rows at a time
constexpr int64_t kLanes = mlsys::LANES;
#if MLSYS_LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif
constexpr int64_t kVectors = kRows / kLanes;
using Vector = mlsys::vf;
using Integers = mlsys::vi;
using mlsys::exp_or_zero;
using mlsys::fast_tanh;
using mlsys::larger;

struct Group {
  const float* arguments;      // [trees, splits, rows], what tanh is taken of; null: made of the columns
  const float* columns;        // [columns, rows]
  const int64_t* feature;      // [trees, splits]: columns
  const float* scale;          // [trees, splits]
  const float* threshold;      // [trees, splits]: argument = column * scale - threshold
  const uint8_t* missing;      // [columns, rows]; null: nothing is
  const float* missing_value;  // [trees, splits]: the argument then
  const float* path;           // [trees, leaves, splits]; null: follow the children
  const int32_t* left;         // [trees, splits]: a split, or ~leaf
  const int32_t* right;
  const int32_t* num_splits;   // [trees]
  const float* count;          // [trees, leaves]: taken off path sums
  const float* leaf;           // [trees, leaves, outputs]
  int64_t num_trees, splits, leaves, outputs, rows, num_columns;
  float split_scale, leaf_scale;
  int32_t is_tanh;
  int32_t num_threads;
};
MLSYS_STRUCT(Group, arguments, columns, feature, scale, threshold, missing, missing_value, path, left, right,
    num_splits, count, leaf, num_trees, splits, leaves, outputs, rows, num_columns, split_scale, leaf_scale, is_tanh,
    num_threads);

struct Gradients {  // null: not wanted; all but `arguments` accumulate
  const float* outputs;  // [outputs, rows]
  float* arguments;      // [trees, splits, rows]
  float* columns;        // [columns, rows]
  float* threshold;      // [trees, splits]
  float* path;           // [trees, leaves, splits]
  float* count;          // [trees, leaves]
  float* leaf;           // [trees, leaves, outputs]
};
MLSYS_STRUCT(Gradients, outputs, arguments, columns, threshold, path, count, leaf);

inline float total(Vector v) {
  float sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

inline float total_of_rows(const Vector* a) {
  Vector sum = a[0];
  for (int64_t v = 1; v < kVectors; ++v) sum += a[v];
  return total(sum);
}

// Sums of the lanes of so many vectors as there are lanes, in order; by neighbours, neighbours of these, ...
inline Vector totals(Vector* of) {
  for (int64_t count = kLanes / 2; count; count /= 2)
    for (int64_t i = 0; i < count; ++i)
      of[i] = SHUFFLE(of[2 * i], of[2 * i + 1], EVEN) + SHUFFLE(of[2 * i], of[2 * i + 1], ODD);
  return of[0];
}

// C [M][rows] = A [M][K] B [K][rows], a(m, k) = a[m * rs_a + k * cs_a], so that A may be transposed. M is a multiple of 8;
// half of the registers hold sums.
void gemm(const float* a, int64_t rs_a, int64_t cs_a, int64_t M, int64_t K, const Vector* b, Vector* c) {
  constexpr int64_t kMR = kLanes / 2;
  for (int64_t m = 0; m < M; m += kMR) {
    for (int64_t v = 0; v < kVectors; v += 2) {
      Vector sums[kMR][2] = {};
      for (int64_t k = 0; k < K; ++k) {
        const Vector first = b[k * kVectors + v], second = b[k * kVectors + v + 1];
        const float* entry = a + m * rs_a + k * cs_a;
        for (int64_t r = 0; r < kMR; ++r) {
          const float factor = entry[r * rs_a];
          sums[r][0] += factor * first;
          sums[r][1] += factor * second;
        }
      }
      for (int64_t r = 0; r < kMR; ++r) {
        c[(m + r) * kVectors + v] = sums[r][0];
        c[(m + r) * kVectors + v + 1] = sums[r][1];
      }
    }
  }
}

// C [M][N] += A [M][rows] B^T [rows][N]
void add_gemm_of_rows(const Vector* a, const Vector* b, int64_t M, int64_t N, float* c) {
  constexpr int64_t kMR = kLanes / 4, kNR = 4;
  for (int64_t m = 0; m < M; m += kMR) {
    for (int64_t n = 0; n < N; n += kNR) {
      Vector sums[kLanes] = {};
      for (int64_t v = 0; v < kVectors; ++v)
        for (int64_t i = 0; i < kMR; ++i)
          for (int64_t j = 0; j < kNR; ++j)
            sums[i * kNR + j] += a[(m + i) * kVectors + v] * b[(n + j) * kVectors + v];
      const Vector entries = totals(sums);
      for (int64_t i = 0; i < kMR; ++i)
        for (int64_t j = 0; j < kNR; ++j) c[(m + i) * N + n + j] += entries[i * kNR + j];
    }
  }
}

// Scratch of one thread: a tree's tables for 64 rows, [splits or leaves, kVectors].
struct Work {
  std::vector<Vector> split, sum, weight, upstream, split_gradient, output;
  Work(const Group& g)
      : split(g.splits * kVectors), sum(std::max(g.splits, g.leaves) * kVectors), weight(g.leaves * kVectors),
        upstream(g.leaves * kVectors), split_gradient(g.splits * kVectors), output(g.outputs * kVectors) {}
};

void load(const float* from, int64_t num_rows, Vector* to) {
  if (num_rows == kRows) {
    std::memcpy(to, from, sizeof(float) * kRows);
  } else {
    std::memset(to, 0, sizeof(float) * kRows);
    std::memcpy(to, from, sizeof(float) * num_rows);
  }
}

// Outputs of a tree's splits in `split`.
void find_splits(const Group& g, int64_t tree, int64_t start, int64_t num_rows, Work& work) {
  const int64_t used = g.path ? g.splits : g.num_splits[tree];
  for (int64_t s = 0; s < used; ++s) {
    const int64_t place = tree * g.splits + s;
    Vector* out = &work.split[s * kVectors];
    if (g.arguments) {
      load(g.arguments + place * g.rows + start, num_rows, out);
    } else {
      load(g.columns + g.feature[place] * g.rows + start, num_rows, out);
      const float scale = g.scale[place], threshold = g.threshold[place];
      for (int64_t v = 0; v < kVectors; ++v) out[v] = out[v] * scale - threshold;
      if (g.missing) {
        const uint8_t* missing = g.missing + g.feature[place] * g.rows + start;
        float* values = reinterpret_cast<float*>(out);
        for (int64_t row = 0; row < num_rows; ++row)
          if (missing[row]) values[row] = g.missing_value[place];
      }
    }
    for (int64_t v = 0; v < kVectors; ++v) out[v] = fast_tanh(out[v] * g.split_scale);
  }
}

// Path sums of a tree's leaves, times the scale, in `weight`, from `split`.
void find_sums(const Group& g, int64_t tree, Work& work) {
  const float* count = g.count + tree * g.leaves;
  if (g.path) {
    gemm(g.path + tree * g.leaves * g.splits, g.splits, 1, g.leaves, g.splits, work.split.data(), work.weight.data());
  } else {
    std::fill(work.weight.begin(), work.weight.end(), Vector{});
    std::fill_n(work.sum.begin(), kVectors, Vector{});
    for (int64_t s = 0; s < g.num_splits[tree]; ++s) {
      const Vector *above = &work.sum[s * kVectors], *own = &work.split[s * kVectors];
      const int32_t left = g.left[tree * g.splits + s], right = g.right[tree * g.splits + s];
      Vector* to_left = left >= 0 ? &work.sum[left * kVectors] : &work.weight[~left * kVectors];
      Vector* to_right = right >= 0 ? &work.sum[right * kVectors] : &work.weight[~right * kVectors];
      for (int64_t v = 0; v < kVectors; ++v) {
        const Vector sum = above[v], output = own[v];
        to_left[v] = sum - output;
        to_right[v] = sum + output;
      }
    }
  }
  const float shift = g.is_tanh ? 1.0f : 0.0f;
  for (int64_t l = 0; l < g.leaves; ++l)
    for (int64_t v = 0; v < kVectors; ++v)
      work.weight[l * kVectors + v] = (work.weight[l * kVectors + v] - (count[l] - shift)) * g.leaf_scale;
}

// From scaled sums to weights, in place.
void choose(const Group& g, Work& work) {
  Vector* weight = work.weight.data();
  if (g.is_tanh) {
    for (int64_t i = 0; i < g.leaves * kVectors; ++i) weight[i] = fast_tanh(weight[i]) * 0.5f + 0.5f;
    return;
  }
  for (int64_t v = 0; v < kVectors; ++v) {
    Vector most = weight[v], sum = {};
    for (int64_t l = 1; l < g.leaves; ++l) most = larger(most, weight[l * kVectors + v]);
    for (int64_t l = 0; l < g.leaves; ++l) {
      const Vector share = exp_or_zero(weight[l * kVectors + v] - most);
      weight[l * kVectors + v] = share;
      sum += share;
    }
    const Vector inverse = 1.0f / sum;
    for (int64_t l = 0; l < g.leaves; ++l) weight[l * kVectors + v] *= inverse;
  }
}

void forward_trees(const Group& g, int64_t first, int64_t last, float* out) {
  Work work(g);
  for (int64_t start = 0; start < g.rows; start += kRows) {
    const int64_t num_rows = std::min(kRows, g.rows - start);
    std::fill(work.output.begin(), work.output.end(), Vector{});
    for (int64_t tree = first; tree < last; ++tree) {
      find_splits(g, tree, start, num_rows, work);
      find_sums(g, tree, work);
      choose(g, work);
      const float* leaf = g.leaf + tree * g.leaves * g.outputs;
      for (int64_t l = 0; l < g.leaves; ++l)
        for (int64_t k = 0; k < g.outputs; ++k)
          for (int64_t v = 0; v < kVectors; ++v)
            work.output[k * kVectors + v] += leaf[l * g.outputs + k] * work.weight[l * kVectors + v];
    }
    for (int64_t k = 0; k < g.outputs; ++k)
      std::memcpy(out + k * g.rows + start, &work.output[k * kVectors], sizeof(float) * num_rows);
  }
}

// Gradients of the scaled sums, in `upstream`, and of leaf values.
void leaf_gradients(const Group& g, int64_t tree, const Gradients& to, Work& work) {
  const float* leaf = g.leaf + tree * g.leaves * g.outputs;
  for (int64_t l = 0; l < g.leaves; ++l) {
    Vector* upstream = &work.upstream[l * kVectors];
    const Vector* weight = &work.weight[l * kVectors];
    std::fill_n(upstream, kVectors, Vector{});
    for (int64_t k = 0; k < g.outputs; ++k) {
      const Vector* output = &work.output[k * kVectors];
      const float value = leaf[l * g.outputs + k];
      Vector sum = {};
      for (int64_t v = 0; v < kVectors; ++v) {
        upstream[v] += value * output[v];
        sum += weight[v] * output[v];
      }
      if (to.leaf) to.leaf[(tree * g.leaves + l) * g.outputs + k] += total(sum);
    }
  }
}

void sum_gradients(const Group& g, Work& work) {
  Vector *upstream = work.upstream.data(), *weight = work.weight.data();
  if (g.is_tanh) {  // weight = (1 + tanh) / 2, so its slope is 2 weight (1 - weight)
    for (int64_t i = 0; i < g.leaves * kVectors; ++i)
      upstream[i] *= 2.0f * g.leaf_scale * weight[i] * (1.0f - weight[i]);
    return;
  }
  for (int64_t v = 0; v < kVectors; ++v) {
    Vector mean = {};
    for (int64_t l = 0; l < g.leaves; ++l) mean += weight[l * kVectors + v] * upstream[l * kVectors + v];
    for (int64_t l = 0; l < g.leaves; ++l)
      upstream[l * kVectors + v] = g.leaf_scale * weight[l * kVectors + v] * (upstream[l * kVectors + v] - mean);
  }
}

// Gradients of splits' outputs in `split_gradient`, from those of sums.
void split_gradients(const Group& g, int64_t tree, const Gradients& to, Work& work) {
  if (g.path) {
    gemm(g.path + tree * g.leaves * g.splits, 1, g.splits, g.splits, g.leaves, work.upstream.data(),
         work.split_gradient.data());
    if (to.path)
      add_gemm_of_rows(work.upstream.data(), work.split.data(), g.leaves, g.splits, to.path + tree * g.leaves * g.splits);
    if (to.count)
      for (int64_t l = 0; l < g.leaves; ++l) to.count[tree * g.leaves + l] -= total_of_rows(&work.upstream[l * kVectors]);
    return;
  }
  for (int64_t s = g.num_splits[tree] - 1; s >= 0; --s) {
    const int32_t left = g.left[tree * g.splits + s], right = g.right[tree * g.splits + s];
    const Vector* from_left = left >= 0 ? &work.sum[left * kVectors] : &work.upstream[~left * kVectors];
    const Vector* from_right = right >= 0 ? &work.sum[right * kVectors] : &work.upstream[~right * kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      const Vector of_left = from_left[v], of_right = from_right[v];
      work.split_gradient[s * kVectors + v] = of_right - of_left;
      work.sum[s * kVectors + v] = of_left + of_right;
    }
  }
}

// From gradients of splits' outputs to those of arguments, thresholds and columns.
void argument_gradients(const Group& g, int64_t tree, int64_t start, int64_t num_rows, const Gradients& to,
                        float* columns, Work& work) {
  const int64_t used = g.path ? g.splits : g.num_splits[tree];
  for (int64_t s = 0; s < g.splits; ++s) {
    const int64_t place = tree * g.splits + s;
    Vector* gradient = &work.split_gradient[s * kVectors];
    if (s >= used) {
      if (to.arguments) std::memset(to.arguments + place * g.rows + start, 0, sizeof(float) * num_rows);
      continue;
    }
    const Vector* output = &work.split[s * kVectors];
    for (int64_t v = 0; v < kVectors; ++v) gradient[v] *= g.split_scale * (1.0f - output[v] * output[v]);
    if (to.arguments) {
      std::memcpy(to.arguments + place * g.rows + start, gradient, sizeof(float) * num_rows);
      continue;
    }
    if (g.missing) {
      const uint8_t* missing = g.missing + g.feature[place] * g.rows + start;
      float* values = reinterpret_cast<float*>(gradient);
      for (int64_t row = 0; row < num_rows; ++row)
        if (missing[row]) values[row] = 0;
    }
    if (to.threshold) to.threshold[place] -= total_of_rows(gradient);
    if (columns) {
      float* column = columns + g.feature[place] * g.rows + start;
      const float* values = reinterpret_cast<const float*>(gradient);
      const float scale = g.scale[place];
      if (num_rows == kRows)
        for (int64_t row = 0; row < kRows; ++row) column[row] += scale * values[row];
      else
        for (int64_t row = 0; row < num_rows; ++row) column[row] += scale * values[row];
    }
  }
}

void backward_trees(const Group& g, int64_t first, int64_t last, const Gradients& to, float* columns) {
  Work work(g);
  const bool is_deep = to.arguments || to.threshold || columns || to.path || to.count;
  for (int64_t start = 0; start < g.rows; start += kRows) {
    const int64_t num_rows = std::min(kRows, g.rows - start);
    for (int64_t k = 0; k < g.outputs; ++k) load(to.outputs + k * g.rows + start, num_rows, &work.output[k * kVectors]);
    for (int64_t tree = first; tree < last; ++tree) {
      find_splits(g, tree, start, num_rows, work);
      find_sums(g, tree, work);
      choose(g, work);
      leaf_gradients(g, tree, to, work);
      if (!is_deep) continue;
      sum_gradients(g, work);
      split_gradients(g, tree, to, work);
      argument_gradients(g, tree, start, num_rows, to, columns, work);
    }
  }
}

// Call work(part, first tree, last tree) for as many parts as threads are wanted and worth it, on any thread.
template <typename Function>
int64_t share_out(const Group& g, Function work) {
  const int64_t most = std::max<int64_t>(1, g.num_trees * g.leaves * g.rows / (256 * 1024));
  const int64_t count = std::min<int64_t>({g.num_threads, g.num_trees, most});
  std::atomic<int64_t> next{0};
  mlsys::SharedPool::run(static_cast<int>(count), [&] {
    for (int64_t part; (part = next.fetch_add(1)) < count;)
      work(part, g.num_trees * part / count, g.num_trees * (part + 1) / count);
  });
  return count;
}

}  // namespace

extern "C" {

// out [outputs, rows] = sum over trees and leaves of weight * leaf.
void mlsys_soft_forward(const Group* group, float* out) {
  const Group& g = *group;
  const int64_t size = g.outputs * g.rows;
  std::vector<float> parts(size * g.num_threads);
  const int64_t count = share_out(g, [&](int64_t thread, int64_t first, int64_t last) {
    forward_trees(g, first, last, thread ? &parts[thread * size] : out);
  });
  for (int64_t thread = 1; thread < count; ++thread)
    for (int64_t i = 0; i < size; ++i) out[i] += parts[thread * size + i];
}

void mlsys_soft_backward(const Group* group, const Gradients* gradients) {
  const Group& g = *group;
  const Gradients& to = *gradients;
  const int64_t size = to.columns ? g.num_columns * g.rows : 0;
  std::vector<float> parts(size * (g.num_threads - 1));
  const int64_t count = share_out(g, [&](int64_t thread, int64_t first, int64_t last) {
    float* columns = !to.columns ? nullptr : thread ? &parts[(thread - 1) * size] : to.columns;
    backward_trees(g, first, last, to, columns);
  });
  for (int64_t thread = 1; thread < count; ++thread)
    for (int64_t i = 0; i < size; ++i) to.columns[i] += parts[(thread - 1) * size + i];
}
}
MLSYS_FUNCTIONS(mlsys_soft_forward, mlsys_soft_backward);

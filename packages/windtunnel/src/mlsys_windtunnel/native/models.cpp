// The costly parts of classical models: sums of tree leaves, linear maps over numbers and categories, logistic
// functions. Trees are the native twin of mlsys_windtunnel.modules.tree.walk. Values become small integers first: a
// value's *bin* is the number of its feature's thresholds that lie below it, so that `value <= threshold` is `bin <=
// index of the threshold`. Cleaning (rounding, zeros that are missing, categories) is done then, once a value, and a
// split is eight bytes. Eight walks run side by side, so that their loads overlap: eight rows in one tree, or one row
// in eight trees where fewer rows are left. Sums run over trees in order, as the sources add, without fused
// multiply-add: they equal the torch form's to the last bit.

#include <mlsys/layout.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <mlsys/thread_pool.h>

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kTile = 64;                      // rows whose values are binned a feature at a time
constexpr int64_t kBlockOfSmall = 256;             // rows at a time where all trees stay in the cache
constexpr int64_t kBlockOfLarge = 4096;            // where each tree is brought into it anew for each block
constexpr int64_t kCacheBytes = 256 * 1024;        // of a core's own: what trees, or the bins of a block, may fill
constexpr int64_t kMostBinBytes = 4096 * 1024;     // where trees do not stay in it
constexpr double kTame = 1e70;                     // as in checks/values.py
constexpr int64_t kWalksWorthAThread = 64 * 1024;  // waking one costs as much as some thousands

template <typename Bin>
struct Node {
  Bin bin;         // of the threshold; kLeaf, or kCategories where the split has a set
  Bin column;      // times kLanes
  uint32_t child;  // the left one; the right one is next. A leaf's is itself
};
template <typename Bin>
constexpr Bin kLeaf = std::numeric_limits<Bin>::max();
template <typename Bin>
constexpr Bin kCategories = kLeaf<Bin> - 1;

struct Feature {  // one that splits read
  int32_t place;                  // in a row of the input
  int32_t edge_start, num_edges;  // distinct thresholds, ascending; of categories: how many codes are known
  int32_t column;                 // the first of its columns of bins
  int32_t has_right, has_left;    // whether it has a column in which missing values go right of all, and left of all
  int32_t is_category;            // one column. Bins: 0 missing, 1 + code, 1 + num_edges for codes beyond
  int32_t zero_is_missing;
};

struct Ensemble {
  const void* nodes;
  const Feature* features;
  const double* edges;
  const uint32_t* root;       // [trees, rounded up to kLanes]
  const uint32_t* leaf;       // [nodes]: rows of leaf_value
  const int32_t* set_start;   // [nodes] of splits with a set: its bytes in `member`
  const int32_t* set_size;    // [nodes]
  const uint8_t* member;      // by bin: whether it goes left; the last byte of a set is for all bins beyond
  const double* leaf_value;   // [leaves, outputs]
  const double* bias;         // [outputs or groups], or null
  double divisor;
  double zero;                // what is no larger counts as zero
  int64_t num_nodes, num_features, num_columns, num_trees, num_outputs, num_groups;
  int32_t is_wide;            // Node<uint32_t>, for more columns or thresholds than 16 bits count
  int32_t has_categories;
  int32_t rounds_to_float32;

  int64_t width() const { return num_groups > 1 ? num_groups : num_outputs; }
};
MLSYS_STRUCT(Ensemble, nodes, features, edges, root, leaf, set_start, set_size, member, leaf_value, bias, divisor,
    zero, num_nodes, num_features, num_columns, num_trees, num_outputs, num_groups, is_wide, has_categories,
    rounds_to_float32);

// XGBoost, which rounds, takes what is below 0 for a category that no set holds. Others take -1 and less for missing.
template <typename Bin>
Bin bin_of_category(const Ensemble& e, const Feature& feature, double value) {
  if (e.rounds_to_float32 && value < 0) return static_cast<Bin>(1 + feature.num_edges);
  if (!(value > -1)) return 0;  // NaN too; what lies between -1 and 0 is cut to 0
  return static_cast<Bin>(1 + (value < feature.num_edges ? static_cast<int64_t>(value) : feature.num_edges));
}

// Bins of one feature in so many rows, which are `stride` apart; to columns of `bins` that are kLanes apart.
template <typename Bin, int64_t rows>
void find_bins(const Ensemble& e, const Feature& feature, const double* x, int64_t stride, Bin* bins) {
  double value[rows];
  for (int64_t row = 0; row < rows; ++row) {
    double v = x[row * stride + feature.place];
    if (e.rounds_to_float32) v = static_cast<double>(static_cast<float>(v));
    if (feature.zero_is_missing && std::fabs(v) <= e.zero) v = std::numeric_limits<double>::quiet_NaN();
    value[row] = v;
  }
  Bin* out = bins + feature.column * kLanes;
  if (feature.is_category) {
    for (int64_t row = 0; row < rows; ++row) out[row] = bin_of_category<Bin>(e, feature, value[row]);
    return;
  }
  const double* edges = e.edges + feature.edge_start;
  const double* below[rows];  // the searches go side by side, without branches
  std::fill_n(below, rows, edges);
  for (int64_t length = feature.num_edges; length > 1;) {
    const int64_t half = length / 2;
#pragma GCC unroll 8
    for (int64_t row = 0; row < rows; ++row) below[row] += half & -int64_t{below[row][half - 1] < value[row]};
    length -= half;
  }
  Bin bin[rows];
  for (int64_t row = 0; row < rows; ++row) bin[row] = static_cast<Bin>(below[row] - edges + (*below[row] < value[row]));
  if (feature.has_right) {
    for (int64_t row = 0; row < rows; ++row) {
      out[row] = value[row] == value[row] ? bin[row] : static_cast<Bin>(feature.num_edges);
    }
    out += kLanes;
  }
  if (feature.has_left) std::copy_n(bin, rows, out);  // NaN is above no edge
}

template <typename Bin>
bool goes_right(const Ensemble& e, uint32_t place, Bin split, Bin bin) {
  if (split != kCategories<Bin>) return split < bin;
  const int64_t entry = std::min<int64_t>(bin, e.set_size[place] - 1);
  return !e.member[e.set_start[place] + entry];
}

// kLanes walks, each to a leaf. `step` lies between the bins of two walks: 1 for rows side by side, 0 for one row.
template <typename Bin, bool has_categories, int64_t step>
void walk(const Ensemble& e, uint32_t* at, const Bin* bins) {
  const auto* nodes = static_cast<const Node<Bin>*>(e.nodes);
  for (;;) {
    Bin all = kLeaf<Bin>;
#pragma GCC unroll 8
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Node<Bin>& node = nodes[at[lane]];
      const Bin split = node.bin, bin = bins[node.column + lane * step];
      all &= split;
      at[lane] = node.child + (has_categories ? goes_right(e, at[lane], split, bin) : split < bin);
    }
    if (all == kLeaf<Bin>) return;
  }
}

// Adds a leaf's values to a row's sums. The bias joins the first tree's value, as the form in torch and the sources add it.
template <int64_t outputs>
inline void add_leaf(const Ensemble& e, int64_t tree, uint32_t place, int64_t group, double* row) {
  const int64_t num_outputs = outputs ? outputs : e.num_outputs;
  const double* value = e.leaf_value + static_cast<int64_t>(e.leaf[place]) * num_outputs;
  double* sum = row + group;
  if (tree >= e.num_groups) {
    for (int64_t output = 0; output < num_outputs; ++output) sum[output] += value[output];
  } else {
    for (int64_t output = 0; output < num_outputs; ++output) {
      sum[output] = e.bias ? value[output] + e.bias[group + output] : value[output];
    }
  }
}

template <int64_t outputs>
void add_tree(const Ensemble& e, int64_t tree, const uint32_t* at, double* rows) {
  const int64_t group = e.num_groups > 1 ? tree % e.num_groups : 0, width = outputs == 2 ? 2 : e.width();
  for (int64_t lane = 0; lane < kLanes; ++lane) add_leaf<outputs>(e, tree, at[lane], group, rows + lane * width);
}

void add_row(const Ensemble& e, int64_t tree, const uint32_t* at, double* row) {
  for (int64_t lane = 0; lane < std::min(kLanes, e.num_trees - tree); ++lane) {
    add_leaf<0>(e, tree + lane, at[lane], e.num_groups > 1 ? (tree + lane) % e.num_groups : 0, row);
  }
}

// Rows of one block. `bins` holds [rows / kLanes, columns, kLanes] of them, then [columns, kLanes] for a row left over.
template <typename Bin, bool has_categories>
void run_block(const Ensemble& e, const double* x, int64_t stride, int64_t num_rows, Bin* bins, double* out) {
  const int64_t width = e.width(), group_size = e.num_columns * kLanes, in_groups = num_rows / kLanes * kLanes;
  for (int64_t tile = 0; tile < in_groups; tile += kTile) {
    for (int64_t feature = 0; feature < e.num_features; ++feature) {
      for (int64_t row = tile; row < std::min(tile + kTile, in_groups); row += kLanes) {
        find_bins<Bin, kLanes>(e, e.features[feature], x + row * stride, stride, bins + row / kLanes * group_size);
      }
    }
  }
  const auto add = e.num_outputs == 1 ? add_tree<1> : e.num_outputs == 2 ? add_tree<2> : add_tree<0>;
  for (int64_t tree = 0; tree < e.num_trees; ++tree) {
    for (int64_t row = 0; row < in_groups; row += kLanes) {
      uint32_t at[kLanes];
      std::fill_n(at, kLanes, e.root[tree]);
      walk<Bin, has_categories, 1>(e, at, bins + row / kLanes * group_size);
      add(e, tree, at, out + row * width);
    }
  }
  for (int64_t row = in_groups; row < num_rows; ++row) {
    for (int64_t feature = 0; feature < e.num_features; ++feature) {
      find_bins<Bin, 1>(e, e.features[feature], x + row * stride, stride, bins);
    }
    for (int64_t tree = 0; tree < e.num_trees; tree += kLanes) {
      uint32_t at[kLanes];
      std::copy_n(e.root + tree, kLanes, at);
      walk<Bin, has_categories, 0>(e, at, bins);
      add_row(e, tree, at, out + row * width);
    }
  }
  if (e.divisor != 1.0) {
    for (int64_t i = 0; i < num_rows * width; ++i) out[i] /= e.divisor;
  }
}

// e to the power of x, which is from -746 to 0, to the last bit or the next: 2^k times Taylor's series of the rest, which
// is 0.35 at most (the next term is below 1e-17). Without a branch, so that compilers compute several at once.
inline double exp_of_negative(double x) {
  constexpr double kRounds = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded to a whole number
  const double shifted = x * 1.4426950408889634 + kRounds, k = shifted - kRounds;
  const double rest = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;  // ln 2 in two parts
  double sum = 1.0 / 6227020800;
  sum = sum * rest + 1.0 / 479001600;
  sum = sum * rest + 1.0 / 39916800;
  sum = sum * rest + 1.0 / 3628800;
  sum = sum * rest + 1.0 / 362880;
  sum = sum * rest + 1.0 / 40320;
  sum = sum * rest + 1.0 / 5040;
  sum = sum * rest + 1.0 / 720;
  sum = sum * rest + 1.0 / 120;
  sum = sum * rest + 1.0 / 24;
  sum = sum * rest + 1.0 / 6;
  sum = sum * rest + 0.5;
  sum = sum * rest + 1.0;
  sum = sum * rest + 1.0;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = static_cast<int64_t>((static_cast<uint64_t>(bits) + 1023 + 64) << 52);
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power * 0x1p-64;  // by a detour, since the smallest powers have no such form
}

// Probabilities of two classes, [rows, 2], from margins times `slope`, which may be the second half of `out`.
void logistic(const double* margin, int64_t num_rows, double slope, double* out) {
  double score[kTile], small[kTile], second[kTile];  // separate loops: compilers do not vectorise a mixed one
  for (int64_t start = 0; start < num_rows; start += kTile) {
    const int64_t count = std::min(kTile, num_rows - start);
    for (int64_t row = 0; row < count; ++row) score[row] = slope * margin[start + row];
    for (int64_t row = 0; row < count; ++row) {
      small[row] = std::fabs(score[row]) > 746.0 ? -746.0 : -std::fabs(score[row]);  // e^-746 is 0
    }
    for (int64_t row = 0; row < count; ++row) small[row] = exp_of_negative(small[row]);
    for (int64_t row = 0; row < count; ++row) second[row] = (score[row] < 0 ? small[row] : 1.0) / (1.0 + small[row]);
    for (int64_t row = 0; row < count; ++row) {
      out[2 * (start + row)] = 1.0 - second[row];
      out[2 * (start + row) + 1] = second[row];
    }
  }
}

struct Piece {  // of what a linear map of one output reads: numbers, or codes that select rows of tables
  int64_t num_columns;
  const double* weight;  // [columns]; of codes the rows of all tables, [rows]
  const int64_t* first;  // [columns] of codes: where a column's rows begin; null for numbers
};
MLSYS_STRUCT(Piece, num_columns, weight, first);

struct Table {  // of one call
  const char* data;
  int64_t row_bytes, column_bytes;  // from one row, or column, to the next
  const double* row(int64_t place) const { return reinterpret_cast<const double*>(data + place * row_bytes); }
};
MLSYS_STRUCT(Table, data, row_bytes, column_bytes);

// Columns are added in four turns, whatever the strides, so that a row's answer is the same to the last bit alone, among
// others and in any layout; a compiler adds four columns, or rows, at once.
constexpr int64_t kTurns = 4;

inline double total(double first, double second, double third, double fourth) {
  return (first + third) + (second + fourth);
}

double dot(const double* x, const double* weight, int64_t num_columns) {
  double turn[kTurns] = {};
  int64_t column = 0;
  for (; column + kTurns <= num_columns; column += kTurns) {
    for (int64_t place = 0; place < kTurns; ++place) turn[place] += x[column + place] * weight[column + place];
  }
  for (; column < num_columns; ++column) turn[column % kTurns] += x[column] * weight[column];
  return total(turn[0], turn[1], turn[2], turn[3]);
}

void add_rows(const Piece& piece, const Table& table, int64_t row, int64_t num_rows, double* sum) {
  for (int64_t lane = 0; lane < num_rows; ++lane) {
    sum[lane] += dot(table.row(row + lane), piece.weight, piece.num_columns);
  }
}

template <bool is_whole>
void add_columns(const Piece& piece, const Table& table, int64_t row, int64_t num_rows, double* sum) {
  const int64_t lanes = is_whole ? kLanes : num_rows;
  const int64_t row_stride = table.row_bytes / 8, column_stride = table.column_bytes / 8;
  double turn[kTurns][kLanes] = {};
  const double* x = table.row(row);
  for (int64_t column = 0; column < piece.num_columns; ++column, x += column_stride) {
    double* sums = turn[column % kTurns];
    for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] += x[lane * row_stride] * piece.weight[column];
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    sum[lane] += total(turn[0][lane], turn[1][lane], turn[2][lane], turn[3][lane]);
  }
}

void add_codes(const Piece& piece, const Table& table, int64_t row, int64_t num_rows, double* sum) {
  const int64_t column_stride = table.column_bytes / 8;
  for (int64_t lane = 0; lane < num_rows; ++lane) {
    const double* codes = table.row(row + lane);
    for (int64_t column = 0; column < piece.num_columns; ++column) {
      sum[lane] += piece.weight[piece.first[column] + static_cast<int64_t>(codes[column * column_stride])];
    }
  }
}

// Rows that one thread answers at a time.
template <typename Bin>
int64_t rows_per_block(const Ensemble& e, int64_t num_rows, int64_t num_threads) {
  const int64_t row_bytes = std::max<int64_t>(1, e.num_columns) * sizeof(Bin);
  const bool is_small = e.num_nodes * static_cast<int64_t>(sizeof(Node<Bin>)) <= kCacheBytes;
  const int64_t most = is_small ? std::min(kBlockOfSmall, kCacheBytes / row_bytes)
                                : std::min(kBlockOfLarge, kMostBinBytes / row_bytes);
  const int64_t share = (num_rows + num_threads - 1) / num_threads;
  return (std::max(kTile, std::min(share, most)) + kLanes - 1) / kLanes * kLanes;
}

template <typename Bin>
void run(const Ensemble& e, const double* x, int64_t num_rows, int64_t stride, int64_t num_threads, double slope,
         double* out) {
  num_threads = std::max<int64_t>(1, std::min(num_threads, num_rows * e.num_trees / kWalksWorthAThread));
  const int64_t block_rows = rows_per_block<Bin>(e, num_rows, num_threads);
  const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
  const auto run_one = e.has_categories ? run_block<Bin, true> : run_block<Bin, false>;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    const int64_t groups = (std::min(num_rows, block_rows) + kLanes - 1) / kLanes;
    std::vector<Bin> bins(groups * kLanes * std::max<int64_t>(1, e.num_columns));  // leaves read a column, too
    for (int64_t block; (block = next.fetch_add(1)) < num_blocks;) {
      const int64_t start = block * block_rows, count = std::min(block_rows, num_rows - start);
      if (slope == 0.0) {
        run_one(e, x + start * stride, stride, count, bins.data(), out + start * e.width());
      } else {
        double* probabilities = out + start * 2;
        run_one(e, x + start * stride, stride, count, bins.data(), probabilities + count);
        logistic(probabilities + count, count, slope, probabilities);
      }
    }
  };
  mlsys::SharedPool::run(static_cast<int>(std::min(num_threads, num_blocks)), work);
}

}  // namespace

extern "C" {

// x: [rows, stride] row-major. out: with slope 0 the sums, [rows, outputs or groups]; else, for one output, probabilities
// of two classes, [rows, 2]. Blocks are claimed one by one, so a thread that is held up holds up nobody.
void mlsys_sum_trees(const void* ensemble, const double* x, int64_t num_rows, int64_t stride, int64_t num_threads,
                     double slope, double* out) {
  const Ensemble& e = *static_cast<const Ensemble*>(ensemble);
  (e.is_wide ? run<uint32_t> : run<uint16_t>)(e, x, num_rows, stride, num_threads, slope, out);
}

// out: with slope 0 the map's values, [rows]; else probabilities of two classes, [rows, 2]. Returns 0 if all values of the
// map are finite and small: one that is not may come of an input that is not finite, which a probability does not show.
int32_t mlsys_linear(const void* pieces, const void* tables, int64_t num_pieces, double bias, int64_t num_rows,
                  double slope, double* out) {
  const Piece* piece = static_cast<const Piece*>(pieces);
  const Table* table = static_cast<const Table*>(tables);
  double* sum = slope == 0.0 ? out : out + num_rows;
  std::fill_n(sum, num_rows, bias);
  for (int64_t row = 0; row < num_rows; row += kLanes) {
    const int64_t count = std::min(kLanes, num_rows - row);
    for (int64_t place = 0; place < num_pieces; ++place) {
      const auto add = piece[place].first                  ? add_codes
                       : table[place].column_bytes == 8 ? add_rows
                       : count == kLanes                ? add_columns<true>
                                                        : add_columns<false>;
      add(piece[place], table[place], row, count, sum + row);
    }
  }
  double square = 0.0;
  for (int64_t row = 0; row < num_rows; ++row) square += sum[row] * sum[row];
  if (slope != 0.0) logistic(sum, num_rows, slope, out);
  return !(square <= kTame);
}
}
MLSYS_FUNCTIONS(mlsys_sum_trees, mlsys_linear);

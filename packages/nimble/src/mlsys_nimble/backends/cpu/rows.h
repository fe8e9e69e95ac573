// Reductions, softmax and layer normalisation: every element of the result depends on a whole row.
#pragma once

#include <vector>

#include "copy.h"

namespace nimble {

inline int64_t size_of(const View& view) {
    int64_t count = 1;
    for (int d = 0; d < view.rank; d++) count *= view.shape[d];
    return count;
}

// Return the offset of each element, in order.
inline std::vector<int64_t> offsets_of(const View& view) {
    std::vector<int64_t> offsets(size_of(view));
    if (offsets.empty()) return offsets;
    int64_t done = 1;  // number of elements of dims d and up
    for (int d = view.rank - 1; d >= 0; d--) {
        for (int64_t i = 1; i < view.shape[d]; i++)
            for (int64_t k = 0; k < done; k++) offsets[i * done + k] = offsets[k] + i * view.strides[d];
        done *= view.shape[d];
    }
    return offsets;
}

// The sum of `vecs` vectors. Blocks of 64 are summed, then 64 of these, so that rounding does not grow with the number. A
// block has four sums, since one would wait for itself.
template <class Term>
inline vf cascade(int64_t vecs, Term&& term) {
    constexpr int64_t BLOCK = 64, BLOCKS = 64 * BLOCK, SUMS = 4;
    vf total{};
    for (int64_t first = 0; first < vecs; first += BLOCKS) {
        vf part{};
        for (int64_t block = first; block < std::min(vecs, first + BLOCKS); block += BLOCK) {
            vf some[SUMS] = {};
            const int64_t stop = std::min(vecs, block + BLOCK);
            int64_t i = block;
            for (; i + SUMS <= stop; i += SUMS)
                for (int64_t k = 0; k < SUMS; k++) some[k] += term(i + k);
            for (; i < stop; i++) some[0] += term(i);
            part += (some[0] + some[1]) + (some[2] + some[3]);
        }
        total += part;
    }
    return total;
}

MLSYS_ENUM(Reduction, REDUCE_SUM, REDUCE_MEAN, REDUCE_MAX, REDUCE_MIN);

struct Reduce {
    View x;        // the dims that are kept, of x
    View reduced;  // the dims that are reduced
    View out;      // the kept dims, of the result
    Reduction op;
    int32_t squares;  // 1: the squares of the elements are reduced
};
MLSYS_STRUCT(Reduce, x, reduced, out, op, squares);

class ReduceKernel : public Kernel {
  public:
    explicit ReduceKernel(const Reduce& r) : r(r), kept(size_of(r.x)), terms(offsets_of(r.reduced)) {
        const int64_t inner = r.x.shape[r.x.rank - 1];
        runs = terms.size() > 1 && r.reduced.strides[r.reduced.rank - 1] == 1 ? r.reduced.shape[r.reduced.rank - 1] : 1;
        // By columns: reduce several adjacent kept elements at once; otherwise one element at a time.
        by_columns = r.x.strides[r.x.rank - 1] == 1 && r.out.strides[r.out.rank - 1] == 1 && inner >= LANES && runs < 2 * LANES;
        if (by_columns) {
            pieces = (inner + COLUMNS - 1) / COLUMNS;
            units = kept / inner * pieces;
        } else {
            per_unit = std::max<int64_t>(1, UNIT_ELEMENTS / std::max<int64_t>(1, terms.size()));
            units = (kept + per_unit - 1) / per_unit;
        }
        View x = r.x, out = r.out;
        x.rank -= by_columns;  // offsets of rows: as many as the batch has, so made for each size
        out.rank -= by_columns;
        kept_x = offsets_of(x);
        kept_out = offsets_of(out);
    }

    void run(int64_t begin, int64_t end, void*) const override {
        const float* x = r.x.as<const float>();
        float* out = r.out.as<float>();
        for (int64_t unit = begin; unit < end; unit++) {
            if (by_columns) {
                columns(x, out, unit);
                continue;
            }
            const int64_t stop = std::min(kept, (unit + 1) * per_unit);
            for (int64_t i = unit * per_unit; i < stop; i++) out[kept_out[i]] = finished(element(x + kept_x[i]));
        }
    }

  private:
    static constexpr int64_t COLUMNS = 32;
    static constexpr size_t BLOCK = 64;  // terms summed before they are added to the rest

    float none() const { return r.op == REDUCE_MAX ? -INFINITY : r.op == REDUCE_MIN ? INFINITY : 0.0f; }
    vf joined(vf a, vf b) const { return r.op == REDUCE_MAX ? maximum(a, b) : r.op == REDUCE_MIN ? minimum(a, b) : a + b; }
    vf term(vf x) const { return r.squares ? x * x : x; }
    float finished(float total) const { return r.op == REDUCE_MEAN ? total / (float)terms.size() : total; }

    // Pairwise summation: blocks of equal size are joined, so the rounding error does not grow with the number of terms.
    struct Levels {
        vf level[4];
        int64_t count[4] = {};
    };

    void add(Levels& to, vf some) const {
        for (int l = 0; l < 3; l++) {
            to.level[l] = joined(to.level[l], some);
            if (++to.count[l] < (int64_t)BLOCK) return;
            some = to.level[l];
            to.level[l] = splat(none());
            to.count[l] = 0;
        }
        to.level[3] = joined(to.level[3], some);
    }

    vf of_gathered(const float* x, size_t first) const {
        vf some = splat(none());
        for (size_t i = 0; i < std::min<size_t>(LANES, terms.size() - first); i++) some[i] = x[terms[first + i]];
        return term(some);
    }

    vf of_run(const float* from, int64_t length) const {
        vf sums[2] = {splat(none()), splat(none())};
        int64_t i = 0;
        for (; i + 2 * LANES <= length; i += 2 * LANES)
            for (int v = 0; v < 2; v++) sums[v] = joined(sums[v], term(load(from + i + v * LANES)));
        for (; i < length; i += LANES) {
            vf some = splat(none());
            for (int64_t k = 0; k < std::min<int64_t>(LANES, length - i); k++) some[k] = from[i + k];
            sums[0] = joined(sums[0], term(some));
        }
        return joined(sums[0], sums[1]);
    }

    vf of_many(const float* x) const {
        constexpr int64_t MOST = BLOCK * 2 * LANES;
        Levels levels;
        for (vf& level : levels.level) level = splat(none());
        if (runs == 1)
            for (size_t t = 0; t < terms.size(); t += LANES) add(levels, of_gathered(x, t));
        else
            for (size_t t = 0; t < terms.size(); t += runs)
                for (int64_t i = 0; i < runs; i += MOST) add(levels, of_run(x + terms[t] + i, std::min(MOST, runs - i)));
        vf total = levels.level[0];
        for (int l = 1; l < 4; l++) total = joined(total, levels.level[l]);
        return total;
    }

    float element(const float* x) const {
        vf total = splat(none());
        if (terms.size() > BLOCK * LANES)
            total = of_many(x);
        else if (runs == 1)
            for (size_t t = 0; t < terms.size(); t += LANES) total = joined(total, of_gathered(x, t));
        else
            for (size_t t = 0; t < terms.size(); t += runs) total = joined(total, of_run(x + terms[t], runs));
        if (r.op == REDUCE_SUM || r.op == REDUCE_MEAN) return sum(total);
        vf folded = total;
        for (int i = 1; i < LANES; i++) folded = joined(folded, splat(total[i]));
        return folded[0];
    }

    void columns(const float* x, float* out, int64_t unit) const {
        const int64_t inner = r.x.shape[r.x.rank - 1], row = unit / pieces;
        const int64_t first = unit % pieces * COLUMNS, stop = std::min(inner, first + COLUMNS);
        x += kept_x[row];
        out += kept_out[row];
        const auto same = [](vf a) { return a; };
        const auto add = [](vf a, vf b) { return a + b; };
        switch (r.op) {
            case REDUCE_MAX: return columns(x, out, first, stop, [](vf a, vf b) { return maximum(a, b); }, same);
            case REDUCE_MIN: return columns(x, out, first, stop, [](vf a, vf b) { return minimum(a, b); }, same);
            default:
                if (r.squares) return columns(x, out, first, stop, add, [](vf a) { return a * a; });
                return columns(x, out, first, stop, add, same);
        }
    }

    template <class Join, class Term>
    void columns(const float* x, float* out, int64_t first, int64_t stop, Join&& join, Term&& term) const {
        constexpr int VECS = COLUMNS / LANES;
        const int64_t inner = r.x.shape[r.x.rank - 1];
        const int vecs = (stop - first + LANES - 1) / LANES;
        int64_t at[VECS];  // first column of each vector; the last vector may overlap the one before it
        vf total[VECS], part[VECS];  // total: sum of finished groups of BLOCK blocks; part: sum of the current group
        for (int v = 0; v < VECS; v++) at[v] = std::min(first + std::min(v, vecs - 1) * LANES, inner - LANES);
        for (int v = 0; v < VECS; v++) total[v] = part[v] = splat(none());
        for (size_t block = 0; block < terms.size(); block += BLOCK) {
            if (block % (BLOCK * BLOCK) == 0)
                for (int v = 0; v < VECS; v++) total[v] = join(total[v], part[v]), part[v] = splat(none());
            vf some[VECS];
            for (vf& one : some) one = splat(none());
            const size_t end = std::min(terms.size(), block + BLOCK);
            if (vecs == VECS)
                for (size_t t = block; t < end; t++)
                    for (int v = 0; v < VECS; v++) some[v] = join(some[v], term(load(x + terms[t] + at[v])));
            else
                for (size_t t = block; t < end; t++)
                    for (int v = 0; v < vecs; v++) some[v] = join(some[v], term(load(x + terms[t] + at[v])));
            for (int v = 0; v < VECS; v++) part[v] = join(part[v], some[v]);
        }
        for (int v = 0; v < VECS; v++) total[v] = join(total[v], part[v]);
        for (int v = 0; v < vecs; v++)
            for (int64_t i = first + v * LANES - at[v]; i < LANES; i++) out[at[v] + i] = finished(total[v][i]);
    }

    const Reduce r;
    const int64_t kept;
    const std::vector<int64_t> terms;
    std::vector<int64_t> kept_x, kept_out;  // offsets of elements, or of rows if `by_columns`
    int64_t runs, pieces = 1, per_unit = 1;
    bool by_columns;
};

struct Rows {
    View x, out;            // outer dims, which count the rows, of x and of the result
    View x_row, out_row;    // dims within a row
    const float* weight;    // layer norm's weight; null: ones
    const float* bias;      // null: zeros
    float eps;
    int32_t is_log;         // 1: log-softmax
};
MLSYS_STRUCT(Rows, x, out, x_row, out_row, weight, bias, eps, is_log);

// Rows of any strides: copy to scratch, pad to whole vectors, compute there, copy back.
class RowKernel : public Kernel {
  public:
    explicit RowKernel(const Rows& r)
        : r(r), x_offsets(offsets_of(r.x)), out_offsets(offsets_of(r.out)), x_terms(offsets_of(r.x_row)),
          out_terms(offsets_of(r.out_row)) {
        size = x_terms.size();
        padded = (size + LANES - 1) / LANES * LANES;
        is_dense = size == 1 || (r.x_row.rank == 1 && r.x_row.strides[0] == 1 && r.out_row.rank == 1 && r.out_row.strides[0] == 1);
        per_unit = std::max<int64_t>(1, UNIT_ELEMENTS / 4 / std::max<int64_t>(1, size));
        units = size ? (x_offsets.size() + per_unit - 1) / per_unit : 0;
        scratch_nbytes = padded * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float* row = (float*)scratch;
        const int64_t stop = std::min<int64_t>(x_offsets.size(), end * per_unit);
        for (int64_t i = begin * per_unit; i < stop; i++) {
            const float* x = r.x.as<const float>() + x_offsets[i];
            float* out = r.out.as<float>() + out_offsets[i];
            if (is_dense)
                std::memcpy(row, x, size * sizeof(float));
            else
                for (int64_t k = 0; k < size; k++) row[k] = x[x_terms[k]];
            compute(row);
            if (is_dense)
                std::memcpy(out, row, size * sizeof(float));
            else
                for (int64_t k = 0; k < size; k++) out[out_terms[k]] = row[k];
        }
    }

  protected:
    virtual void compute(float* row) const = 0;  // `size` numbers in place; room for `padded`

    const Rows r;
    const std::vector<int64_t> x_offsets, out_offsets, x_terms, out_terms;
    int64_t size, padded, per_unit;
    bool is_dense;
};

class SoftmaxKernel : public RowKernel {
  public:
    explicit SoftmaxKernel(const Rows& r) : RowKernel(r) {
        is_short = size < 2 * LANES;
        if (is_short) scratch_nbytes = size * LANES * sizeof(float);
        // Strided rows with unit stride between rows, in x and out, such as a softmax over a dimension that is not the last.
        const int64_t side = r.x.rank ? r.x.shape[r.x.rank - 1] : 0;
        by_columns = !is_short && !is_dense && side >= LANES && r.x.strides[r.x.rank - 1] == 1 && r.out.strides[r.out.rank - 1] == 1;
        if (!by_columns) return;
        width = side;
        pieces = (side + LANES - 1) / LANES;
        units = x_offsets.size() / side * pieces;
    }

    // Short rows are computed one vector at a time, one row per lane.
    void run(int64_t begin, int64_t end, void* scratch) const override {
        if (by_columns) {
            for (int64_t unit = begin; unit < end; unit++) columns(unit);
            return;
        }
        if (!is_short) return RowKernel::run(begin, end, scratch);
        float* block = (float*)scratch;  // [size][rows]
        const int64_t stop = std::min<int64_t>(x_offsets.size(), end * per_unit);
        for (int64_t first = begin * per_unit; first < stop; first += LANES) {
            const int some = std::min<int64_t>(LANES, stop - first);
            if (some < LANES) std::fill(block, block + size * LANES, 0.0f);
            for (int row = 0; row < some; row++) {
                const float* x = r.x.as<const float>() + x_offsets[first + row];
                for (int64_t k = 0; k < size; k++) block[k * LANES + row] = x[x_terms[k]];
            }
            vf most = splat(-INFINITY), total{};
            for (int64_t k = 0; k < size; k++) most = larger(load(block + k * LANES), most);
            for (int64_t k = 0; k < size; k++) {
                const vf x = load(block + k * LANES) - most, e = exp(x);
                total += e;
                store(block + k * LANES, r.is_log ? x : e);
            }
            const vf shift = log(total), scale = splat(1.0f) / total;
            for (int64_t k = 0; k < size; k++) {
                const vf x = load(block + k * LANES);
                store(block + k * LANES, r.is_log ? x - shift : x * scale);
            }
            for (int row = 0; row < some; row++) {
                float* out = r.out.as<float>() + out_offsets[first + row];
                for (int64_t k = 0; k < size; k++) out[out_terms[k]] = block[k * LANES + row];
            }
        }
    }

  private:
    bool is_short, by_columns;
    int64_t width = 0, pieces = 0;

    // LANES rows in place, one per lane. The result may be x: each element is read before it is written.
    void columns(int64_t unit) const {
        const int64_t first = unit / pieces * width + unit % pieces * LANES;
        const int some = std::min<int64_t>(LANES, width - unit % pieces * LANES);
        const float* x = r.x.as<const float>() + x_offsets[first];
        float* out = r.out.as<float>() + out_offsets[first];
        const auto read = [some](const float* from) { return some == LANES ? load(from) : load_first(from, some); };
        const auto write = [some](float* to, vf y) { some == LANES ? store(to, y) : store_first(to, y, some); };
        vf most = splat(-INFINITY);
        for (int64_t k = 0; k < size; k++) most = larger(read(x + x_terms[k]), most);
        const vf total = cascade(size, [&](int64_t k) {
            const vf y = read(x + x_terms[k]) - most, e = exp(y);
            write(out + out_terms[k], r.is_log ? y : e);
            return e;
        });
        const vf shift = log(total), scale = splat(1.0f) / total;
        for (int64_t k = 0; k < size; k++) {
            const vf y = read(out + out_terms[k]);
            write(out + out_terms[k], r.is_log ? y - shift : y * scale);
        }
    }

    void compute(float* row) const override {
        std::fill(row + size, row + padded, -INFINITY);
        vf most = splat(-INFINITY);
        for (int64_t i = 0; i < padded; i += LANES) most = larger(load(row + i), most);
        const vf top = splat(largest(most));
        const vf total = cascade(padded / LANES, [&](int64_t v) {
            const vf x = load(row + v * LANES) - top, e = exp(x);
            store(row + v * LANES, r.is_log ? x : e);
            return e;
        });
        const float whole = sum(total);
        const vf shift = splat(std::log(whole)), scale = splat(1.0f / whole);
        for (int64_t i = 0; i < padded; i += LANES) store(row + i, r.is_log ? load(row + i) - shift : load(row + i) * scale);
    }
};

class LayerNormKernel : public RowKernel {
  public:
    explicit LayerNormKernel(const Rows& r) : RowKernel(r) {
        const int64_t vecs = padded / LANES;
        if (is_dense && vecs <= MAX_KEPT) in_registers = of_vectors(vecs, std::make_integer_sequence<int, MAX_KEPT>());
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        if (!in_registers) return RowKernel::run(begin, end, scratch);
        const int64_t stop = std::min<int64_t>(x_offsets.size(), end * per_unit);
        const float *x = r.x.as<const float>();
        float* out = r.out.as<float>();
        for (int64_t i = begin * per_unit; i < stop; i++) in_registers(*this, x + x_offsets[i], out + out_offsets[i]);
    }

  private:
    static constexpr int MAX_KEPT = 12;  // vectors of a row
    using InRegisters = void (*)(const LayerNormKernel&, const float*, float*);
    InRegisters in_registers = nullptr;

    template <int... VECS>
    static InRegisters of_vectors(int64_t vecs, std::integer_sequence<int, VECS...>) {
        constexpr InRegisters table[] = {normalise<VECS + 1>...};
        return table[vecs - 1];
    }

    // A row of VECS vectors, the last of which may be a part.
    template <int VECS>
    static void normalise(const LayerNormKernel& k, const float* x, float* out) {
        const int last = k.size - (VECS - 1) * LANES;
        vf row[VECS], total{}, squares{};
        for (int v = 0; v < VECS - 1; v++) row[v] = load(x + v * LANES);
        row[VECS - 1] = load_first(x + (VECS - 1) * LANES, last);
        for (int v = 0; v < VECS; v++) total += row[v];
        const vf mean = splat(sum(total) / k.size);
        for (int v = 0; v < VECS; v++) row[v] -= mean;
        row[VECS - 1] = first_lanes(row[VECS - 1], last);
        for (int v = 0; v < VECS; v++) squares = fma(row[v], row[v], squares);
        const vf scale = splat(1.0f / std::sqrt(sum(squares) / k.size + k.r.eps));
        for (int v = 0; v < VECS; v++) {  // weight and bias are padded to whole vectors
            row[v] *= scale;
            if (k.r.weight) row[v] *= load(k.r.weight + v * LANES);
            if (k.r.bias) row[v] += load(k.r.bias + v * LANES);
        }
        for (int v = 0; v < VECS - 1; v++) store(out + v * LANES, row[v]);
        store_first(out + (VECS - 1) * LANES, row[VECS - 1], last);
    }

    void compute(float* row) const override {
        std::fill(row + size, row + padded, 0.0f);
        const vf total = cascade(padded / LANES, [&](int64_t v) { return load(row + v * LANES); });
        const float mean = sum(total) / size;
        std::fill(row + size, row + padded, mean);
        const vf squares = cascade(padded / LANES, [&](int64_t v) {
            const vf x = load(row + v * LANES) - splat(mean);
            store(row + v * LANES, x);
            return x * x;
        });
        const vf scale = splat(1.0f / std::sqrt(sum(squares) / size + r.eps));
        for (int64_t i = 0; i < padded; i += LANES) {  // weight and bias are padded to whole vectors, too
            vf y = load(row + i) * scale;
            if (r.weight) y *= load(r.weight + i);
            if (r.bias) y += load(r.bias + i);
            store(row + i, y);
        }
    }
};

struct Embedding {
    const float* table;  // [rows, width]
    int64_t rows, width;
    View indices;
    View out;  // as indices, of the rows' first elements
    int32_t* fault;  // set to 1 where an index has no row
};
MLSYS_STRUCT(Embedding, table, rows, width, indices, out, fault);

class EmbeddingKernel : public Kernel {
  public:
    explicit EmbeddingKernel(const Embedding& e) : e(e), from(offsets_of(e.indices)), to(offsets_of(e.out)) {
        per_unit = std::max<int64_t>(1, UNIT_ELEMENTS / std::max<int64_t>(1, e.width));
        units = (from.size() + per_unit - 1) / per_unit;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        for (int64_t i = begin * per_unit; i < std::min<int64_t>(from.size(), end * per_unit); i++) {
            const int64_t row =
                e.indices.dtype == INT64 ? e.indices.as<const int64_t>()[from[i]] : e.indices.as<const int32_t>()[from[i]];
            float* out = e.out.as<float>() + to[i];
            if (row >= 0 && row < e.rows)
                std::memcpy(out, e.table + row * e.width, e.width * sizeof(float));
            else
                __atomic_store_n(e.fault, 1, __ATOMIC_RELAXED);  // several workers may
        }
    }

  private:
    const Embedding e;
    const std::vector<int64_t> from, to;
    int64_t per_unit;
};

}  // namespace nimble

// Layers of an encoder on packed texts: the tokens of all texts one after another, attention within each text.
//
// A block of rows passes all weights of a layer while it stays in the second-level cache: the products around attention,
// sums, norms and MLP need nothing of other rows. A row's result does not depend on the others, nor on how many there are.
#include "attention.h"

#include <mlsys/thread_pool.h>

using namespace encoder;

struct Norm {
    const float* weight;  // null: the rows as they are
    const float* bias;    // null: none
};
MLSYS_STRUCT(Norm, weight, bias);

struct Layer {
    Matrix query_key_value, attention_output, up, down;
    Norm attention_norm, output_norm;
    int64_t reach;     // of attention, in tokens; -1: any
    int64_t rotation;  // which of a batch's rotations turns queries and keys; -1: none
};
MLSYS_STRUCT(Layer, query_key_value, attention_output, up, down, attention_norm, output_norm, reach, rotation);

struct Encoder {
    const Layer* layers;
    int64_t size;  // features of a row; heads have size / num_heads
    int64_t inner; // features of the MLP
    int32_t num_heads;
    Activation activation;
    int32_t is_pre_norm;  // norms before attention and MLP; else after each sum
    int32_t is_gated;     // `up` gives what is activated, then what it is multiplied with
    float eps;
};
MLSYS_STRUCT(Encoder, layers, size, inner, num_heads, activation, is_pre_norm, is_gated, eps);

struct Batch {
    float* hidden;           // [tokens][size]: read, and overwritten
    const int64_t* lengths;  // of the texts
    int32_t num_texts, first_layer, stop_layer, threads;
    const float* bias;       // of relative positions, [heads][longest][longest]; null: none
    int64_t longest;
    const float* const* cosines;  // by rotation, [tokens][features of a head]
    const float* const* sines;
};
MLSYS_STRUCT(Batch, hidden, lengths, num_texts, first_layer, stop_layer, threads, bias, longest, cosines, sines);

namespace {

// What a run writes between its phases; kept from one run to the next, since new pages cost a hundredth of it.
struct Between {
    std::vector<float> given;  // [rows][3 * size]: queries, keys, values
    std::vector<float> mixed;  // [rows][size]: what attention gives

    void fit(size_t rows, size_t size) {
        if (given.size() < rows * 3 * size) given.resize(rows * 3 * size);
        if (mixed.size() < rows * size) mixed.resize(rows * size);
    }
};

struct Run {
    const Encoder& encoder;
    const Batch& batch;
    std::vector<int64_t> begins;  // by text: its first row; then the number of rows
    std::vector<float>&given, &mixed;
    int64_t head_size;

    Run(const Encoder& encoder, const Batch& batch, Between& between)
        : encoder(encoder), batch(batch), begins(1, 0), given(between.given), mixed(between.mixed) {
        for (int text = 0; text < batch.num_texts; text++) begins.push_back(begins.back() + batch.lengths[text]);
        between.fit(begins.back(), encoder.size);
        head_size = encoder.size / encoder.num_heads;
    }

    // On each thread of `pool`, the same phases.
    void run(ThreadPool& pool, int thread) {
        const int64_t rows = begins.back();
        const int blocks = (int)std::min(rows, num_blocks(rows, pool.size));
        for (int number = batch.first_layer; number <= batch.stop_layer; number++) {
            pool.for_each(thread, blocks, [&](int block) {
                const int64_t first = rows * block / blocks;
                const int count = (int)(rows * (block + 1) / blocks - first);
                if (number > batch.first_layer) finish_layer(encoder.layers[number - 1], first, count);
                if (number < batch.stop_layer) begin_layer(encoder.layers[number], first, count);
            });
            if (number == batch.stop_layer) break;
            pool.for_each(thread, batch.num_texts * encoder.num_heads, [&](int i) {
                attend_head(encoder.layers[number], i / encoder.num_heads, i % encoder.num_heads);
            });
        }
    }

    // Blocks of at most BLOCK rows, as many for each thread: with one more on some thread the others would wait for it.
    static int64_t num_blocks(int64_t rows, int threads) {
        const int64_t round = (int64_t)threads * BLOCK;
        return (rows + round - 1) / round * threads;
    }

    // Queries, keys and values of rows.
    void begin_layer(const Layer& layer, int64_t first, int count) {
        const float* rows = batch.hidden + first * encoder.size;
        if (encoder.is_pre_norm) rows = normed(layer.attention_norm, rows, count);
        float* to = given.data() + first * 3 * encoder.size;
        multiply(rows, encoder.size, count, layer.query_key_value, to, 3 * encoder.size, [](vf x, int, int64_t) { return x; });
        if (layer.rotation < 0) return;
        for (int row = 0; row < count; row++, to += 3 * encoder.size)
            for (int head = 0; head < 2 * encoder.num_heads; head++)  // of queries, then of keys
                turn(to + head * head_size, layer.rotation, first + row);
    }

    void turn(float* x, int64_t rotation, int64_t row) {
        const int64_t half = head_size / 2;
        const float *cosine = batch.cosines[rotation] + row * head_size, *sine = batch.sines[rotation] + row * head_size;
        for (int64_t i = 0; i < half; i++) {
            const float left = x[i], right = x[half + i];
            x[i] = left * cosine[i] - right * sine[i];
            x[half + i] = right * cosine[half + i] + left * sine[half + i];
        }
    }

    void attend_head(const Layer& layer, int text, int number) {
        static thread_local Scratch scratch;
        const int64_t first = begins[text], at = number * head_size, stride = 3 * encoder.size;
        const float* query = given.data() + first * stride + at;
        const float* bias = batch.bias ? batch.bias + number * batch.longest * batch.longest : nullptr;
        attend(
            {query, query + encoder.size, query + 2 * encoder.size, mixed.data() + first * encoder.size + at, stride,
             encoder.size, (int)batch.lengths[text], (int)head_size, bias, batch.longest, layer.reach},
            scratch);
    }

    // Everything behind attention.
    void finish_layer(const Layer& layer, int64_t first, int count) {
        static thread_local std::vector<float> inner;
        const int64_t size = encoder.size;
        float* rows = batch.hidden + first * size;
        const auto added = [&](vf x, int row, int64_t column) MLSYS_INLINE { return load(rows + row * size + column) + x; };
        multiply(mixed.data() + first * size, size, count, layer.attention_output, rows, size, added);
        if (!encoder.is_pre_norm) normalise(layer.attention_norm, rows, rows, count);
        const float* x = encoder.is_pre_norm ? normed(layer.output_norm, rows, count) : rows;
        const int64_t width = layer.up.N;
        inner.resize(count * width);
        with_activation(encoder.activation, 0.0f, [&](auto&& activated) {
            multiply(x, size, count, layer.up, inner.data(), width, [&](vf y, int, int64_t column) MLSYS_INLINE {
                return column < encoder.inner ? activated(y) : y;
            });
        });
        if (encoder.is_gated)
            for (int row = 0; row < count; row++)
                for (int64_t i = 0; i < encoder.inner; i += LANES) {
                    float* at = &inner[row * width + i];
                    store(at, load(at) * load(at + encoder.inner));
                }
        multiply(inner.data(), width, count, layer.down, rows, size, added);
        if (!encoder.is_pre_norm) normalise(layer.output_norm, rows, rows, count);
    }

    const float* normed(const Norm& norm, const float* rows, int count) {
        static thread_local std::vector<float> kept;
        kept.resize(BLOCK * encoder.size);
        normalise(norm, rows, kept.data(), count);
        return kept.data();
    }

    void normalise(const Norm& norm, const float* from, float* to, int count) {
        const int64_t size = encoder.size;
        for (int row = 0; row < count; row++, from += size, to += size) {
            if (!norm.weight) {
                if (from != to) std::memcpy(to, from, 4 * size);
                continue;
            }
            vf total = {}, squares = {};
            for (int64_t i = 0; i < size; i += LANES) total += load(from + i);
            const vf mean = splat(sum(total) / (float)size);
            for (int64_t i = 0; i < size; i += LANES) {
                const vf x = load(from + i) - mean;
                squares = fma(x, x, squares);
            }
            const vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)size + encoder.eps));
            for (int64_t i = 0; i < size; i += LANES) {
                const vf x = (load(from + i) - mean) * scale;
                store(to + i, fma(x, load(norm.weight + i), norm.bias ? load(norm.bias + i) : vf{}));
            }
        }
    }
};

// The helpers of one call at a time; others wait for their turn, so a batch that is ready begins as soon as the one before
// it ends. Never destroyed: threads may still call while the process ends.
struct Helpers {
    std::mutex mutex;
    std::unique_ptr<ThreadPool> pool;
    Between between;
};

Helpers& helpers() {
    static std::atomic<Helpers*> current{nullptr};
    static const bool is_prepared = [] {
        current = new Helpers;
#if defined(__linux__)
        pthread_atfork(nullptr, nullptr, [] { current = new Helpers; });  // a forked child has no threads
#endif
        return true;
    }();
    (void)is_prepared;
    return *current;
}

void run_on(ThreadPool& pool, Run& run) {
    std::pair<ThreadPool&, Run&> both(pool, run);
    pool.run(
        [](void* with, int thread) {
            auto& [pool, run] = *(std::pair<ThreadPool&, Run&>*)with;
            run.run(pool, thread);
        },
        &both);
}

}  // namespace

extern "C" {

int64_t encoder_columns() { return NR; }

// [N, K], as torch has a Linear's weight, in panels.
void encoder_pack(const float* weight, float* panels, int64_t K, int64_t N) {
    for (int64_t column = 0; column < N; column += NR)
        pack_panel<NR>(panels + column * K, K, N - column, [&](int64_t k, int64_t n) { return weight[(column + n) * K + k]; });
}

void encoder_run(const Encoder* encoder, const Batch* batch) {
    Helpers& own = helpers();
    if (batch->threads < 2) {
        static thread_local Between between;
        ThreadPool alone(1, 0);
        Run run(*encoder, *batch, between);
        return run_on(alone, run);
    }
    std::lock_guard<std::mutex> lock(own.mutex);
    // Pin helpers: layers are too short to recover from a bad wake-up placement.
    if (!own.pool || own.pool->size != batch->threads)
        own.pool = std::make_unique<ThreadPool>(batch->threads, 2000, 2000, true);
    Run run(*encoder, *batch, own.between);
    run_on(*own.pool, run);
}

}  // extern "C"

MLSYS_FUNCTIONS(encoder_columns, encoder_pack, encoder_run);

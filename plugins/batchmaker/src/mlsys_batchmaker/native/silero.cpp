// One frame of each of several voice streams through Silero's network, states in the rows of a pool. Every sum runs in
// one order whatever the number of streams, so an answer is that of the stream alone. One thread; each worker has a Runner.
#include "gates.h"

#include <cstring>
#include <vector>

using namespace batchmaker;

constexpr int WIDE = 128, NARROW = 64;  // channels
constexpr int STEPS = 4;                // Fourier windows in a frame, each half a window after the last
constexpr int GROUP = 48;               // frames that pass all layers together: their rows stay in the second-level cache
constexpr int64_t LINE = 16;            // floats of a cache line: keeps rows from sharing a set

struct Network {
    int32_t window;        // samples of a Fourier window, a multiple of 64
    float out_bias;
    Matrix real;           // [window / 2, window / 2]: of sums of mirrored samples; bins below the last
    Matrix imaginary;      // the same of differences
    const float* highest;  // [window / 2]: the last bin, which has no imaginary part
    Matrix conv1;          // [3 * (window / 2 + 1), WIDE], taps after one another
    Matrix conv2;          // [3 * WIDE, NARROW], every second step
    Matrix conv3;          // [3 * NARROW, NARROW], every second step
    Matrix conv4;          // [NARROW, WIDE]: the middle tap, as its neighbours are padding
    const float* bias1;
    const float* bias2;
    const float* bias3;
    const float* bias4;
    Matrix from_input;     // [WIDE, 4 * WIDE], columns as those of the other loops: [block][gate][unit]
    Matrix from_hidden;
    const float* gate_bias;
    const float* out_weight;  // [WIDE]
};
MLSYS_STRUCT(Network, window, out_bias, real, imaginary, highest, conv1, conv2, conv3, conv4, bias1, bias2, bias3, bias4,
    from_input, from_hidden, gate_bias, out_weight);

// Frames of different streams: no two have one slot.
struct Frames {
    int64_t count;
    const int64_t* slots;  // [count]: row of each state
    const float* samples;  // [count, 2 * window]
    float* context;        // [slots, window / 4]: the last samples of the frame before
    float* hidden;         // [slots, WIDE]
    float* state;          // [slots, WIDE]
    float* speech;         // [count]: probabilities
};
MLSYS_STRUCT(Frames, count, slots, samples, context, hidden, state, speech);

namespace {

struct Runner {
    Network net;
    int64_t half, bins, frame, context;
    int64_t fold_row, spectrum_row, first_row = 6 * WIDE + LINE, second_row = 4 * NARROW + LINE;
    int64_t third_row = NARROW + LINE, fourth_row = WIDE + LINE;
    std::vector<float> padded, even, odd, spectrum, first, second, third, fourth, hidden, sums, others;
    std::vector<const float*> rows, more;

    explicit Runner(const Network& given) : net(given), half(net.window / 2), bins(half + 1), frame(2 * net.window),
        context(net.window / 4), fold_row(half + LINE), spectrum_row(6 * bins + LINE) {
        padded.resize(context + frame + context);
        for (auto* folded : {&even, &odd}) folded->resize(GROUP * STEPS * fold_row);
        spectrum.resize(GROUP * spectrum_row);  // the first and last of its six rows stay zero, as those below
        first.resize(GROUP * first_row);
        second.resize(GROUP * second_row);
        third.resize(GROUP * third_row);
        for (auto* wide : {&fourth, &hidden}) wide->resize(GROUP * fourth_row);
        sums.resize(4 * GROUP * STEPS * UNITS);
        others.resize(GROUP * STEPS * UNITS);
    }

    // A window's samples mirrored onto its first half: the Fourier weights are even or odd there, and zero at the first.
    void fold(const float* window, float* sum, float* difference) {
        sum[0] = window[half];
        difference[0] = 0;
        for (int64_t n = 1; n < half; n++) {
            sum[n] = window[n] + window[net.window - n];
            difference[n] = window[n] - window[net.window - n];
        }
    }

    void read(const float* samples, float* kept, int64_t number) {
        std::memcpy(padded.data(), kept, 4 * context);
        std::memcpy(padded.data() + context, samples, 4 * frame);
        for (int64_t i = 0; i < context; i++) padded[context + frame + i] = padded[context + frame - 2 - i];
        std::memcpy(kept, samples + frame - context, 4 * context);
        for (int64_t t = 0; t < STEPS; t++) {
            int64_t at = (number * STEPS + t) * fold_row;
            fold(&padded[t * half], &even[at], &odd[at]);
        }
    }

    void transform(int count) {
        int M = count * STEPS;
        rows.resize(M), more.resize(M);
        for (int i = 0; i < M; i++) rows[i] = &even[i * fold_row], more[i] = &odd[i * fold_row];
        auto bins_of = [&](int i) { return &spectrum[i / STEPS * spectrum_row + (1 + i % STEPS) * bins]; };
        for (int64_t panel = 0; panel * UNITS < half; panel++) {
            std::memset(sums.data(), 0, sizeof(float) * M * UNITS);
            std::memset(others.data(), 0, sizeof(float) * M * UNITS);
            multiply(rows.data(), M, net.real, panel, sums.data());
            multiply(more.data(), M, net.imaginary, panel, others.data());
            for (int i = 0; i < M; i++)
                for (int v = 0; v < UNITS; v += LANES) {
                    vf re = load(&sums[i * UNITS + v]), im = load(&others[i * UNITS + v]);
                    store(bins_of(i) + panel * UNITS + v, mlsys::sqrt(fma(re, re, im * im)));
                }
        }
        for (int i = 0; i < M; i++) bins_of(i)[half] = std::abs(dot(rows[i], net.highest, half));
    }

    static float dot(const float* a, const float* b, int64_t count) {
        vf total = {};
        for (int64_t k = 0; k < count; k += LANES) total = fma(load(a + k), load(b + k), total);
        return sum(total);
    }

    // relu(rows times matrix + bias) to what `out` gives for each row.
    template <class Out>
    void dense(const Matrix& matrix, const float* bias, int64_t width, Out&& out) {
        int M = (int)rows.size();
        for (int64_t panel = 0; panel * UNITS < width; panel++) {
            for (int i = 0; i < M; i++) std::memcpy(&sums[i * UNITS], bias + panel * UNITS, 4 * UNITS);
            multiply(rows.data(), M, matrix, panel, sums.data());
            for (int i = 0; i < M; i++)
                for (int v = 0; v < UNITS; v += LANES)
                    store(out(i) + panel * UNITS + v, larger(load(&sums[i * UNITS + v]), vf{}));
        }
    }

    void encode(int count) {
        rows.resize(count * 4);
        for (int i = 0; i < count * 4; i++) rows[i] = &spectrum[i / 4 * spectrum_row + i % 4 * bins];
        dense(net.conv1, net.bias1, WIDE, [&](int i) { return &first[i / 4 * first_row + (1 + i % 4) * WIDE]; });
        rows.resize(count * 2);
        for (int i = 0; i < count * 2; i++) rows[i] = &first[i / 2 * first_row + i % 2 * 2 * WIDE];
        dense(net.conv2, net.bias2, NARROW, [&](int i) { return &second[i / 2 * second_row + (1 + i % 2) * NARROW]; });
        rows.resize(count);
        for (int i = 0; i < count; i++) rows[i] = &second[i * second_row];
        dense(net.conv3, net.bias3, NARROW, [&](int i) { return &third[i * third_row]; });
        for (int i = 0; i < count; i++) rows[i] = &third[i * third_row];
        dense(net.conv4, net.bias4, WIDE, [&](int i) { return &fourth[i * fourth_row]; });
    }

    void recur(const Frames& task, int64_t from, int count) {
        rows.resize(count), more.resize(count);
        for (int i = 0; i < count; i++) {
            rows[i] = &fourth[i * fourth_row];
            more[i] = task.hidden + task.slots[from + i] * WIDE;
        }
        for (int64_t block = 0; block * UNITS < WIDE; block++) {
            for (int gate = 0; gate < 4; gate++) {
                int64_t panel = block * 4 + gate;
                float* own = &sums[(int64_t)gate * count * UNITS];
                for (int i = 0; i < count; i++) std::memcpy(own + i * UNITS, net.gate_bias + panel * UNITS, 4 * UNITS);
                multiply(rows.data(), count, net.from_input, panel, own);
                multiply(more.data(), count, net.from_hidden, panel, own);
            }
            for (int i = 0; i < count; i++) {
                Row states = {};
                states.state = states.new_state = task.state + task.slots[from + i] * WIDE + block * UNITS;
                states.new_hidden = &hidden[i * fourth_row + block * UNITS];
                finish(LSTM, &sums[i * UNITS], (int64_t)count * UNITS, states, UNITS);
            }
        }
        for (int i = 0; i < count; i++) {
            float* now = &hidden[i * fourth_row];
            std::memcpy(task.hidden + task.slots[from + i] * WIDE, now, 4 * WIDE);
            for (int v = 0; v < WIDE; v += LANES) store(now + v, larger(load(now + v), vf{}));
            task.speech[from + i] = sigmoid(splat(dot(now, net.out_weight, WIDE) + net.out_bias))[0];
        }
    }

    void run(const Frames& task) {
        for (int64_t from = 0; from < task.count; from += GROUP) {
            int count = (int)std::min<int64_t>(GROUP, task.count - from);
            for (int i = 0; i < count; i++)
                read(task.samples + (from + i) * frame, task.context + task.slots[from + i] * context, i);
            transform(count);
            encode(count);
            recur(task, from, count);
        }
    }
};

}  // namespace

extern "C" {

int64_t silero_units() { return UNITS; }
void* silero_runner(const Network* network) { return new Runner(*network); }
void silero_free(void* runner) { delete (Runner*)runner; }
void silero_run(void* runner, const Frames* frames) { ((Runner*)runner)->run(*frames); }

// Pack `weight` [K, gates * width] in panels of UNITS columns: [block][gate][K][unit], zeros beyond the last.
void silero_pack(const float* weight, float* panels, int64_t K, int32_t gates, int32_t width) {
    for (int64_t block = 0; block * UNITS < width; block++)
        for (int gate = 0; gate < gates; gate++) {
            const float* at = weight + gate * width + block * UNITS;
            pack_panel<UNITS>(panels + (block * gates + gate) * K * UNITS, K, width - block * UNITS,
                [&](int64_t k, int unit) { return at[k * gates * width + unit]; });
        }
}
}
MLSYS_FUNCTIONS(silero_units, silero_runner, silero_free, silero_run, silero_pack);

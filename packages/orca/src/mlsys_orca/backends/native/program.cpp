// A decoder's iteration as a list of operators, and the threads that run it: what mlsys_orca.backends.native.library loads.
//
// The operators work on registers, fp32 matrices [rows, width]. Each is one parallel loop, or two where its rows must be
// prepared first. Layers run without a return to Python in between.

#include <chrono>
#include <map>
#include <variant>

#include <mlsys/thread_pool.h>

#include "amx.h"
#include "attention_in_floats.h"
#include "attention_in_pairs.h"
#include "attention_plan.h"
#include "epilogue.h"
#include "gemm.h"
#include "gemm_input.h"
#include "integer.h"
#include "integer_blocks.h"
#include "lookup.h"
#include "meeting.h"
#include "operators.h"
#include "recurrence.h"
#include "routing.h"
#include "rows.h"

namespace orca {

constexpr int MIN_TILE_ROWS = 48, MAX_TILE_ROWS = 512, TILES_PER_THREAD = 8;
constexpr int NEAR_TILE_ROWS = 96;    // whose sums stay in the first-level cache
constexpr int AMX_BYTES = 640 << 10;  // of rows that AMX takes again and again: they stay in the second-level cache

class Program {
  public:
    Program(int threads, int spins, int num_registers, const int32_t* widths)
        : pool(threads, spins), registers(num_registers), owned(num_registers), peaks(threads), own_memory(threads) {
        for (int i = 0; i < num_registers; i++) registers[i].stride = registers[i].width = widths[i];
    }

    std::vector<std::variant<Gemm, Attention, Normalise, GatherRows, Reduce, Route, Grouped, Combine, Convolve, Scan, Gate>> operators;
    Meeting* meeting = nullptr;  // of the ranks that share the sums; null: there is one

    // Returns whether it ran to its end: false, where a meeting was aborted.
    bool run(const Batch& what) {
        batch = &what;
        choose_forms();
        registers.front().floats = what.states;
        registers.back().floats = what.logits;
        registers.back().stride = what.logits_stride;
        for (size_t i = 1; i + 1 < registers.size(); i++)
            registers[i].floats = owned[i].grow((int64_t)(what.num_rows + AMX_TILE_ROWS) * registers[i].width);
        prepared = owned[0].grow(room_of_prepared());
        divide_spans();
        if (what.largest)
            for (auto& own : peaks) own.assign(what.num_sampled, Peak());
        pool.run([](void* self, int thread) { ((Program*)self)->execute(thread); }, this);
        if (meeting) meeting->next = meetings_ended;
        for (int row = 0; what.largest && row < what.num_sampled; row++) {
            Peak most;
            for (auto& own : peaks) most = std::max(most, own[row]);
            what.largest[row] = most.column;
            if (what.peaks) what.peaks[row] = most.value;
        }
        return !meeting || !meeting->is_aborted();
    }

  private:
    // The register that a product fills: its rank's slot of the next meeting, where it is a part of a sum.
    Register target_of(const Gemm& op, uint32_t number) const {
        Register target = registers[op.target];
        if (op.is_partial) {
            target.floats = meeting->slot(number, meeting->rank);
            target.is_bf16 = false;
        }
        return target;
    }

    // Floats of the rows that the largest product has prepared; makes room for routings, too.
    int64_t room_of_prepared() {
        const int rows = batch->num_rows;
        int64_t most = 0;
        for (auto& op : operators)
            if (auto* gemm = std::get_if<Gemm>(&op)) {
                most = std::max(most, (int64_t)(rows + AMX_TILE_ROWS) * gemm->matrix.K);
            } else if (auto* route = std::get_if<Route>(&op)) {
                if ((int)routings.size() <= route->routing) routings.resize(route->routing + 1);
                routings[route->routing].grow(*route, rows);
            } else if (auto* grouped = std::get_if<Grouped>(&op)) {
                const int each = grouped->rows_of == PARTS ? grouped->count : routings[grouped->routing].num_chosen;
                most = std::max(most, ((int64_t)rows * each + AMX_TILE_ROWS) * grouped->gemm.matrix.K);
            }
        return most;
    }

    static bool is_by_amx(const Gemm& op) {
        return op.matrix.is_in_pairs() && op.matrix.K / op.num_slices % AMX_K == 0 && has_amx();
    }

    // A register that only GEMMs of pairs read, as it is, holds what they would make of it: bf16.
    void choose_forms() {
        for (size_t i = 1; i + 1 < registers.size(); i++) registers[i].is_bf16 = true;
        for (auto& op : operators) {
            auto* grouped = std::get_if<Grouped>(&op);
            if (auto* gemm = grouped ? &grouped->gemm : std::get_if<Gemm>(&op)) {
                if (!gemm->matrix.is_in_pairs() || gemm->norm.kind != NO_NORM || (grouped && grouped->rows_of != ENTRIES))
                    registers[gemm->source].is_bf16 = false;
                if (gemm->accumulates || gemm->is_partial) registers[gemm->target].is_bf16 = false;
            } else if (auto* route = std::get_if<Route>(&op)) {
                registers[route->source].is_bf16 = false;
            } else if (auto* combine = std::get_if<Combine>(&op)) {
                for (int which : {combine->source, combine->target, combine->shared, combine->gate})
                    if (which >= 0) registers[which].is_bf16 = false;
            } else if (auto* attention = std::get_if<Attention>(&op)) {
                registers[attention->source].is_bf16 = false;
            } else if (auto* normalise = std::get_if<Normalise>(&op)) {
                registers[normalise->source].is_bf16 = registers[normalise->target].is_bf16 = false;
            } else if (auto* reduce = std::get_if<Reduce>(&op)) {
                registers[reduce->target].is_bf16 = false;
            } else if (auto* convolve = std::get_if<Convolve>(&op)) {
                registers[convolve->source].is_bf16 = registers[convolve->target].is_bf16 = false;
            } else if (auto* scan = std::get_if<Scan>(&op)) {
                registers[scan->steps].is_bf16 = registers[scan->target].is_bf16 = false;
            } else if (auto* gate = std::get_if<Gate>(&op)) {
                registers[gate->gate].is_bf16 = registers[gate->target].is_bf16 = registers[gate->source].is_bf16 = false;
            }
        }
    }

    // Which request each row belongs to, and what each attention's threads do.
    void divide_spans() {
        span_of_row.resize(batch->num_rows);
        for (int s = 0; s < batch->num_spans; s++)
            for (int row = batch->spans[s].start; row < batch->spans[s].stop; row++) span_of_row[row] = s;
        plans.clear();
        plan_of.assign(operators.size(), 0);
        int64_t most = 0;
        for (size_t i = 0; i < operators.size(); i++)
            if (auto* op = std::get_if<Attention>(&operators[i])) {
                size_t& at = plan_of[i];
                while (at < plans.size() && !plans[at].is_for(*op)) at++;
                if (at == plans.size()) {
                    const bool by_amx = batch->cache == PAIRS && attends_by_amx(op->head_dim);
                    plans.emplace_back(*op, *batch, span_of_row, by_amx ? AMX_MR : TILE_QUERIES, pool.size);
                }
                most = std::max(most, plans[at].num_floats);
            }
        pieces.grow(most);
    }

    void execute(int thread) {
        using Clock = std::chrono::steady_clock;
        double* seconds = thread ? nullptr : batch->seconds;
        AmxTiles tiles;
        int rows = batch->num_rows;
        uint32_t number = meeting ? meeting->next : 0;  // counted by each thread: a late one may be some meetings behind
        for (auto& op : operators) {
            const auto begin = seconds ? Clock::now() : Clock::time_point();
            if (auto* gemm = std::get_if<Gemm>(&op)) {
                if (is_by_amx(*gemm)) tiles.for_gemm();
                run_gemm(*gemm, thread, rows, target_of(*gemm, number));
            } else if (auto* attention = std::get_if<Attention>(&op)) {
                if (batch->cache == PAIRS) tiles.for_attention();
                const AttentionPlan& plan = plans[plan_of[&op - operators.data()]];
                switch (batch->cache) {
                    case FLOATS: run_attention<InFloats<float>>(*attention, plan, thread); break;
                    case HALVES: run_attention<InFloats<uint16_t>>(*attention, plan, thread); break;
                    case FP16: run_attention<InFloats<half>>(*attention, plan, thread); break;
                    case CODES: run_attention<InFloats<int8_t>>(*attention, plan, thread); break;
                    case PAIRS:
                        attends_by_amx(attention->head_dim) ? run_attention<ByAmx>(*attention, plan, thread)
                                                            : run_attention<ByInstruction>(*attention, plan, thread);
                        break;
                }
            } else if (auto* normalise = std::get_if<Normalise>(&op)) {
                run_normalise(*normalise, thread, rows);
            } else if (auto* reduce = std::get_if<Reduce>(&op)) {
                run_reduce(*reduce, thread, rows, number++);
            } else if (auto* route = std::get_if<Route>(&op)) {
                run_route(*route, thread, rows);
            } else if (auto* grouped = std::get_if<Grouped>(&op)) {
                if (is_by_amx(grouped->gemm)) tiles.for_gemm();
                run_grouped(*grouped, thread, rows, target_of(grouped->gemm, number));
            } else if (auto* combine = std::get_if<Combine>(&op)) {
                run_combine(*combine, thread, rows);
            } else if (auto* convolve = std::get_if<Convolve>(&op)) {
                run_convolve(*convolve, pool, thread, *batch, registers);
            } else if (auto* scan = std::get_if<Scan>(&op)) {
                run_scan(*scan, pool, thread, *batch, registers, own_memory[thread].rows);
            } else if (auto* gate = std::get_if<Gate>(&op)) {
                run_gate(*gate, thread, rows);
            } else {
                run_gather_rows(std::get<GatherRows>(op), thread);
                rows = batch->num_sampled;
            }
            if (seconds) *seconds++ += std::chrono::duration<double>(Clock::now() - begin).count();
        }
        if (meeting && !thread) meetings_ended = number;
    }

    // --- GEMM ---

    void run_gemm(const Gemm& op, int thread, int rows, const Register& target) {
        const int K = op.matrix.K;
        if (!rows) return;
        GemmInput input(op, registers[op.source], rows, own_memory[thread].rows);
        if (input.is_prepared_by_all()) {
            float* spare = own_memory[thread].rows.grow(K);
            for_each_row(thread, rows, K, [&](int row) { input.prepare(row, prepared, spare); });
            input.use(prepared);
        }
        with_form(op, [&](auto form) { run_tiles<decltype(form)>(op, target, thread, rows, input, scratch_of(thread, K)); });
    }

    float* scratch_of(int thread, int K) {
        return own_memory[thread].tiles.grow(
            (int64_t)NEAR_PANELS * K * PANEL + SLICE_BUFFERS * MAX_TILE_ROWS * TILE_PANELS * PANEL);
    }

    // How a product's tiles are computed.
    template <class P, bool PAIRS_OF_ROWS = false, bool AMX = false>
    struct Form {
        using Panel = P;
        static constexpr bool IN_PAIRS = PAIRS_OF_ROWS, BY_AMX = AMX;
    };

    // use(Form) for the one that `op` takes.
    template <class Use>
    static void with_form(const Gemm& op, Use&& use) {
        const auto quantised = [&](auto form) {
            using Panel = typename decltype(form)::Panel;
            if (is_by_amx(op)) return use(Form<Panel, true, true>());
            if constexpr (HAS_PAIRS)
                if (op.matrix.is_in_pairs()) return use(Form<Panel, true>());
            use(form);
        };
        switch (op.matrix.kind) {
            case F32: return use(Form<F32Panel>());
            case BF16: return use(Form<Bf16Panel>());
            case INT8: return quantised(Form<Int8Panel>());
            case INT4: return quantised(Form<Int4Panel>());
            case INT8_QUADS: return use(Form<Int8Quads>());
            case INT2_QUADS: return use(Form<BlockPanel<2>>());
            case INT3_QUADS: return use(Form<BlockPanel<3>>());
            case INT4_QUADS: return op.matrix.factors ? use(Form<BlockPanel<4>>()) : use(Form<Int4Quads>());
            case INT5_QUADS: return use(Form<BlockPanel<5>>());
            case INT6_QUADS: return use(Form<BlockPanel<6>>());
            case BF16_PAIRS: return is_by_amx(op) ? use(Form<PairsPanel, true, true>()) : use(Form<PairsPanel, true>());
        }
    }

    // work(row) for each of `rows`, which have `size` features; every thread calls it alike.
    template <class Work>
    void for_each_row(int thread, int rows, int size, Work&& work) {
        const int step = std::max(1, 8192 / size);
        pool.for_each(thread, (rows + step - 1) / step, [&](int i) {
            for (int row = i * step; row < std::min(rows, (i + 1) * step); row++) work(row);
        });
    }

    // How many blocks `rows` fall into, if a block has `most` at most and every thread is to have several tiles.
    int blocks_of_rows(int rows, int most, int across) const {
        return std::max((rows + most - 1) / most, (TILES_PER_THREAD * pool.size + across - 1) / across);
    }

    // A tile is a pair of panels against a block of rows: the more rows, the less often a panel is read and decoded.
    template <class Form>
    void run_tiles(const Gemm& op, const Register& target, int thread, int rows, GemmInput& input, float* scratch) {
        if constexpr (Form::BY_AMX) return run_by_amx<Form>(op, target, thread, rows, input, scratch);
        using Panel = typename Form::Panel;
        const int across = (op.matrix.panels() + TILE_PANELS - 1) / TILE_PANELS;
        // Where a panel is read as it stands, the next rows find it in the second-level cache; else it was decoded for all.
        constexpr bool IN_QUADS = std::is_same_v<Panel, Int8Quads> || std::is_same_v<Panel, Int4Quads> || is_block_panel<Panel>;
        constexpr bool AS_IT_IS = IN_QUADS || std::is_same_v<Panel, F32Panel> || std::is_same_v<Panel, PairsPanel>;
        int wanted = blocks_of_rows(rows, AS_IT_IS ? NEAR_TILE_ROWS : MAX_TILE_ROWS, across);
        if (wanted > 1) wanted = (wanted + pool.size - 1) / pool.size * pool.size;  // that threads have rows of their own
        const int block = std::max((rows + wanted - 1) / wanted, std::min(rows, MIN_TILE_ROWS));
        const int down = (rows + block - 1) / block;
        // Each thread takes blocks of its own, panel by panel, where there are enough of them; else panels of its own.
        const int sets = down % pool.size ? 1 : pool.size, own = down / sets;
        pool.for_each(thread, across * down, [&](int i) {
            const int set = i / (across * own), rest = i % (across * own);
            const int panel = rest / own * TILE_PANELS, first = (set * own + rest % own) * block;
            run_tile<Form>(op, target, thread, panel, first, std::min(rows, first + block), input.rows(), input.lda, scratch);
        });
    }

    // As `run_tiles`, rows in pairs of bf16: all panels meet one block of rows, then the next; 32 rows at a time are
    // multiplied and finished, so that their sums never leave the first-level cache.
    template <class Form>
    void run_by_amx(const Gemm& op, const Register& target, int thread, int rows, GemmInput& input, float* scratch) {
        const int across = (op.matrix.panels() + TILE_PANELS - 1) / TILE_PANELS;
        const int wanted = blocks_of_rows(rows, std::max(AMX_MR, AMX_BYTES / op.matrix.K / 2), across);
        const int block = ((rows + wanted - 1) / wanted + AMX_MR - 1) / AMX_MR * AMX_MR;
        pool.for_each(thread, across * ((rows + block - 1) / block), [&](int i) {
            const int panel = i % across * TILE_PANELS, first = i / across * block, stop = std::min(rows, first + block);
            run_tile<Form>(op, target, thread, panel, first, stop, input.rows(), input.lda, scratch);
        });
    }

    // Compute and finish two panels of rows `first` to `stop`; `from`: row 0 of the product, rows `lda` floats apart.
    template <class Form>
    void run_tile(
        const Gemm& op, const Register& target, int thread, int panel, int first, int stop, const float* from, int64_t lda,
        float* scratch) {
        using Panel = typename Form::Panel;
        const Matrix& m = op.matrix;
        const int K = m.K, some = stop - first;
        if constexpr (Form::BY_AMX) {
            const uint32_t* pairs = (const uint32_t*)from;
            if constexpr (std::is_same_v<Panel, PairsPanel>) {
                multiply_block(op, target, thread, panel, first, stop, pairs, [&](int begin) {
                    return StoredPanels{{Panel(m, panel, begin).weights, Panel(m, panel + 1, begin).weights}};
                });
            } else if (some <= AMX_MR) {
                multiply_block(op, target, thread, panel, first, stop, pairs, [&](int begin) {
                    return DecodedPanels<Panel>{
                        {Panel(m, panel, begin), Panel(m, panel + 1, begin)}, m.group_size, (uint16_t*)scratch};
                });
            } else {
                uint16_t* decoded[2] = {(uint16_t*)scratch, (uint16_t*)scratch + (int64_t)m.K * PANEL};
                for (int p = 0; p < 2; p++) decode_pairs(Panel(m, panel + p), 0, m.K, m.group_size, decoded[p]);
                multiply_block(op, target, thread, panel, first, stop, pairs, [&](int begin) {
                    return StoredPanels{{decoded[0] + (int64_t)begin * PANEL, decoded[1] + (int64_t)begin * PANEL}};
                });
            }
        } else {
            float* sums = scratch + (int64_t)NEAR_PANELS * K * PANEL;
            const float* at = from + first * lda;
            add_slices(op.num_slices, some * TILE_PANELS * PANEL, sums, [&](int slice, float* to) {
                const Features part{K / op.num_slices * slice, K / op.num_slices};
                const auto begins = [&](int row, int few) {
                    if (!slice) prefetch_target(op, target, panel, first + row, few);
                };
                const uint32_t* pairs = (const uint32_t*)at + part.begin / 2;
                if constexpr (is_block_panel<Panel>)
                    multiply_tile_of_blocks<Panel>(m, panel, part, some, at, lda, to, begins);
                else if constexpr (std::is_same_v<Panel, Int8Quads> || std::is_same_v<Panel, Int4Quads>)
                    multiply_tile_of_codes<Panel>(m, panel, part, some, at, lda, to, begins);
                else if constexpr (!Form::IN_PAIRS)
                    multiply_tile<Panel, TILE_PANELS>(m, panel, part, some, at + part.begin, lda, scratch, to, begins);
                else if constexpr (std::is_same_v<Panel, PairsPanel>)
                    multiply_tile_of_pairs(m, panel, part, some, pairs, lda, 2 * (int64_t)K * PANEL, to, begins);
                else
                    multiply_tile_quantised<Panel>(m, panel, part, some, pairs, lda, (uint16_t*)scratch, to, begins);
            });
            apply_epilogue(op, target, peaks_of(op, thread), panel, first, some, sums);
        }
    }

    // Rows `first` to `stop` against two panels, which `panels_from(begin)` gives from a feature on. Where they are many, the panels that follow are prefetched; with
    // few, all waits for memory anyway, and its own prediction serves best.
    template <class PanelsFrom>
    void multiply_block(
        const Gemm& op, const Register& target, int thread, int panel, int first, int stop, const uint32_t* input,
        PanelsFrom&& panels_from) {
        const Matrix& m = op.matrix;
        const int size = m.K / op.num_slices, parts = (stop - first + AMX_MR - 1) / AMX_MR;
        Prefetch prefetch;
        if (m.kind == BF16_PAIRS && parts > 2)
            prefetch = {(const char*)PairsPanel(m, panel + TILE_PANELS).weights, (2 * AMX_TILE_ROWS + parts - 1) / parts};
        constexpr int TILE = AMX_MR * TILE_PANELS * PANEL;
        alignas(64) float sums[SLICE_BUFFERS * TILE];
        for (int row = first; row < stop; row += AMX_MR) {
            const int some = std::min(AMX_MR, stop - row);
            const int tile = some > AMX_TILE_ROWS ? TILE : TILE / 2;  // as much as is written
            add_slices(op.num_slices, tile, sums, [&](int slice, float* to) {
                const int begin = slice * size;
                const uint32_t* from = input + ((int64_t)row * m.K + begin) / 2;
                multiply_by_amx(panels_from(begin), size, some, from, m.K / 2, to, prefetch);
                prefetch.next += (int64_t)(size / AMX_K) * prefetch.lines * 64;
            });
            apply_epilogue(op, target, peaks_of(op, thread), panel, row, some, sums);
        }
    }

    // Peaks of all rows, where `op` makes the logits and the batch wants the largest.
    Peak* peaks_of(const Gemm& op, int thread) {
        return batch->largest && op.target == (int)registers.size() - 1 ? peaks[thread].data() : nullptr;
    }

    // --- experts, and heads by themselves ---

    void run_route(const Route& op, int thread, int rows) {
        Routing& routing = routings[op.routing];
        const Register& scores = registers[op.source];
        for_each_row(thread, rows, 16 * op.num_experts, [&](int row) {
            choose_experts(op, scores.floats + row * scores.stride, row, routing);
        });
        pool.for_each(thread, 1, [&](int) { order_entries(op, rows, routing); });
    }

    // Products of unlike rows. Late threads count what others have done: entries stay as they are until the run is over.
    void run_grouped(const Grouped& op, int thread, int rows, Register target) {
        if (!rows) return;
        const bool is_parts = op.rows_of == PARTS;
        const Routing* routing = is_parts ? nullptr : &routings[op.routing];
        const bool is_shared = is_parts && !op.source_step;  // all products meet the same rows
        const int count = is_shared ? rows : rows * (is_parts ? op.count : routing->num_chosen), K = op.gemm.matrix.K;
        const Register& source = registers[op.gemm.source];
        OwnMemory& own = own_memory[thread];
        GemmInput input(op.gemm, source, count, own.rows);
        if (op.rows_of != ENTRIES || input.is_prepared_by_all()) {
            float* spare = own.rows.grow(K);
            for_each_row(thread, count, K, [&](int i) {
                const int64_t row = op.rows_of == TOKENS ? routing->tokens[i] : i % rows;
                if (op.rows_of == ENTRIES) return input.prepare(i, prepared, spare);
                const int64_t column = is_parts ? op.source_column + (int64_t)(i / rows) * op.source_step : 0;
                input.prepare(source.floats + row * source.stride + column, i, prepared, spare);
            });
            input.use(prepared);
        }
        if (!is_parts) target.stride = target.width / routing->num_chosen;
        own.blocks.clear();
        for (int which = 0; which < op.count; which++) {
            const int begin = is_parts ? (is_shared ? 0 : which * rows) : routing->begins[which];
            const int end = is_parts ? begin + rows : routing->begins[which + 1];
            for (int first = begin; first < end; first += NEAR_TILE_ROWS)
                own.blocks.push_back({which, first, std::min(end, first + NEAR_TILE_ROWS)});
        }
        const int across = (op.gemm.matrix.panels() + TILE_PANELS - 1) / TILE_PANELS;
        with_form(op.gemm, [&](auto form) {
            float* scratch = scratch_of(thread, K);
            pool.for_each(thread, across * (int)own.blocks.size(), [&](int i) {
                const Block& block = own.blocks[i / across];
                Gemm gemm = op.gemm;
                gemm.matrix = op.matrices[block.which];
                if (op.biases) gemm.bias = ((const float* const*)op.biases)[block.which];
                Register to = target;
                const float* from = input.rows();
                if (is_parts) {
                    const int64_t before = is_shared ? 0 : (int64_t)block.which * rows;
                    to.move(block.which * (int64_t)op.target_step - before * to.stride);
                }
                run_tile<decltype(form)>(gemm, to, thread, i % across * TILE_PANELS, block.first, block.stop, from, input.lda, scratch);
            });
        });
    }

    void run_combine(const Combine& op, int thread, int rows) {
        const Routing& routing = routings[op.routing];
        const Register& target = registers[op.target];
        const float* entries = registers[op.source].floats;
        const int size = target.width, chosen = routing.num_chosen;
        for_each_row(thread, rows, size * chosen, [&](int row) {
            const int at = row * chosen;
            const float* shared = op.shared < 0 ? nullptr : registers[op.shared].floats + row * registers[op.shared].stride;
            vf gate = splat(1.0f);
            if (op.gate >= 0) gate = sigmoid(splat(registers[op.gate].floats[row * registers[op.gate].stride]));
            float* to = target.floats + row * target.stride;
            for (int c = 0; c < size; c += LANES) {
                const int lanes = std::min(LANES, size - c);
                vf total{};
                for (int i = at; i < at + chosen; i++) {
                    vf x = load_some(entries + (int64_t)routing.entries[i] * size + c, lanes);
                    if (op.biases) x += load_some(op.biases + (int64_t)routing.experts[i] * op.stride + c, lanes);
                    total = fma(splat(routing.weights[i]), x, total);
                }
                if (shared) total = fma(gate, load_some(shared + c, lanes), total);
                store_some(to + c, op.accumulates ? total + load_some(to + c, lanes) : total, lanes);
            }
        });
    }

    // --- attention ---

    template <class Arithmetic>
    void run_attention(const Attention& op, const AttentionPlan& plan, int thread) {
        using Cache = typename Arithmetic::Cache;
        const int padded_dim = padded(op.head_dim), group = op.num_heads / op.num_kv_heads;
        const Cache cache{
            (typename Cache::Element*)batch->keys, (typename Cache::Element*)batch->values, batch->num_layers, op.layer, op.num_kv_heads,
            op.head_dim, padded_dim};
        const Rows rows{
            registers[op.source].floats, registers[op.source].width, op.rotary_dim ? batch->cos[op.rotary] : nullptr,
            op.rotary_dim ? batch->sin[op.rotary] : nullptr};
        const auto keep_row = [&](const Span& span, int row, int head) {
            const int64_t at = (int64_t)row * op.rotary_dim;
            keep(op, cache, span, batch->block_tables + span.table, row, head, rows.qkv + (int64_t)row * rows.width, rows.cos + at, rows.sin + at);
        };
        const auto tile_of = [&](const AttentionPlan::Task& task, int head) {
            const Span& span = batch->spans[task.span];
            return Tile{span, batch->block_tables + span.table, head, task.begin, task.end};
        };
        const auto partials_of = [&](const AttentionPlan::Task& task, float* memory) {
            return Partials{memory, (task.end - task.begin) * group, padded_dim, task.first_piece};
        };
        // Rows of a request see each other's keys: all are kept before any tile that may need them.
        if (!plan.is_whole) {
            const int step = 8;
            pool.for_each(thread, (batch->num_rows + step - 1) / step, [&](int i) {
                for (int row = i * step; row < std::min(batch->num_rows, (i + 1) * step); row++)
                    for (int head = 0; head < op.num_kv_heads; head++)
                        keep_row(batch->spans[span_of_row[row]], row, head);
            });
        }
        const int num_tiles = (int)plan.tasks.size() * op.num_kv_heads;
        if (plan.is_cut) {
            const auto memory_of = [&](const AttentionPlan::Task& task, int head) {
                return pieces.grow(0) + task.memory + head * Partials::size(task.num_pieces, (task.end - task.begin) * group, padded_dim);
            };
            pool.for_each(thread, plan.items.size(), [&](int i) {
                const AttentionPlan::Item& item = plan.items[i];
                const AttentionPlan::Task& task = plan.tasks[item.task];
                attend<Arithmetic>(
                    op, cache, tile_of(task, item.head), item.first_piece, item.stop_piece, rows,
                    partials_of(task, memory_of(task, item.head)), own_memory[thread].attention);
            });
            pool.for_each(thread, num_tiles, [&](int i) {
                const AttentionPlan::Task& task = plan.tasks[i / op.num_kv_heads];
                const int head = i % op.num_kv_heads;
                combine(op, tile_of(task, head), partials_of(task, memory_of(task, head)), registers[op.target]);
            });
            return;
        }
        const auto first_task = [&](int owner) {  // of the rows that are its own in other operators, too
            const int row = (int64_t)batch->num_rows * owner / pool.size;
            const auto at = std::lower_bound(
                plan.tasks.begin(), plan.tasks.end(), row, [](const AttentionPlan::Task& task, int row) { return task.begin < row; });
            return (int)(at - plan.tasks.begin()) * op.num_kv_heads;
        };
        pool.for_each_dealt(thread, first_task, [&](int i) {
            const AttentionPlan::Task& task = plan.tasks[i / op.num_kv_heads];
            const Tile tile = tile_of(task, i % op.num_kv_heads);
            if (plan.is_whole)
                for (int row = task.begin; row < task.end; row++) keep_row(tile.span, row, tile.head);
            OwnMemory& own = own_memory[thread];
            const Partials parts =
                partials_of(task, own.pieces.grow(Partials::size(task.num_pieces, (task.end - task.begin) * group, padded_dim)));
            attend<Arithmetic>(op, cache, tile, task.first_piece, task.first_piece + task.num_pieces, rows, parts, own.attention);
            combine(op, tile, parts, registers[op.target]);
        });
    }

    void run_normalise(const Normalise& op, int thread, int rows) {
        const int size = op.norm.size;
        float* out = own_memory[thread].rows.grow(size);
        for_each_row(thread, rows, size, [&](int row) {
            const auto at = [&](int which, int column) {
                return registers[which].floats + (int64_t)row * registers[which].stride + column;
            };
            normalise(op.norm, at(op.source, op.column), out);
            float* target = at(op.target, op.target_column);
            for (int c = 0; c < size; c++) target[c] = op.accumulates ? target[c] + out[c] : out[c];
        });
    }

    void run_gate(const Gate& op, int thread, int rows) {
        for_each_row(thread, rows, op.size, [&](int row) {
            const auto at = [&](int which) { return registers[which].floats + row * registers[which].stride; };
            let_through(op, at(op.source), at(op.gate) + op.gate_column, at(op.target));
        });
    }

    // All threads wait for the other ranks, and add what these have. An aborted meeting leaves wrong sums, for nobody.
    void run_reduce(const Reduce& op, int thread, int rows, uint32_t number) {
        const Register& target = registers[op.target];
        const int size = target.width;
        meeting->arrive(number, (int64_t)rows * size);
        meeting->wait(number);
        for_each_row(thread, rows, size, [&](int row) {
            float* to = target.floats + row * target.stride;
            for (int c = 0; c < size; c += LANES) {
                const int lanes = std::min(LANES, size - c);
                vf x = add_ranks(meeting->num_ranks, [&](int rank) {
                    return load_some(meeting->slot(number, rank) + (int64_t)row * size + c, lanes);
                });
                if (op.bias) x += load(op.bias + c);
                store_some(to + c, op.accumulates ? x + load_some(to + c, lanes) : x, lanes);
            }
        });
    }

    // Few rows, each to its own place or before it: one thread moves them.
    void run_gather_rows(const GatherRows& op, int thread) {
        if (batch->num_sampled == batch->num_rows) return;
        const Register& all = registers[op.taken];
        const int64_t nbytes = all.width * (all.is_bf16 ? sizeof(uint16_t) : sizeof(float));
        char* rows = (char*)all.floats;
        pool.for_each(thread, 1, [&](int) {
            for (int i = 0; i < batch->num_sampled; i++) std::memmove(rows + i * nbytes, rows + batch->sampled[i] * nbytes, nbytes);
        });
    }

    struct Block {  // of rows of one of several products
        int which, first, stop;
    };
    struct OwnMemory {
        Scratch tiles, rows, attention, pieces;  // tiles: decoded panels and sums; rows: prepared ones; pieces: Partials
        std::vector<Block> blocks;
    };

    mlsys::ThreadPool pool;
    std::vector<Register> registers;
    std::vector<Scratch> owned;            // registers' memory; index 0 is `prepared`
    std::vector<std::vector<Peak>> peaks;  // per thread: of each sampled row
    std::vector<OwnMemory> own_memory;     // per thread
    std::vector<Routing> routings;         // by number
    float* prepared = nullptr;
    const Batch* batch = nullptr;
    uint32_t meetings_ended = 0;  // number of the meeting after the last of this run
    std::vector<int32_t> span_of_row;
    std::vector<AttentionPlan> plans;  // of this iteration's attentions, alike ones once
    std::vector<size_t> plan_of;       // by operator
    Scratch pieces;                    // Partials of contexts that are cut
};

// --- packing ---

template <class T>
void pack(const T* from, T* to, int N, int K, int panels, int stride, int first) {
    for (int panel = 0; panel < panels; panel++) {
        const T* at = from + (int64_t)panel * PANEL * K;
        pack_panel<PANEL>(
            to + (int64_t)(first + panel * stride) * K * PANEL, K, N - panel * PANEL,
            [&](int64_t k, int n) { return at[(int64_t)n * K + k]; });
    }
}

}  // namespace orca

extern "C" {

using orca::Program;

Program* orca_program(int threads, int spins, int num_registers, const int32_t* widths) {
    return new Program(threads, spins, num_registers, widths);
}
void orca_free(Program* program) { delete program; }
void orca_add_gemm(Program* program, const orca::Gemm* op) { program->operators.emplace_back(*op); }
void orca_add_attention(Program* program, const orca::Attention* op) { program->operators.emplace_back(*op); }
void orca_add_gather_rows(Program* program, const orca::GatherRows* op) { program->operators.emplace_back(*op); }
void orca_add_normalise(Program* program, const orca::Normalise* op) { program->operators.emplace_back(*op); }
void orca_add_reduce(Program* program, const orca::Reduce* op) { program->operators.emplace_back(*op); }
void orca_add_route(Program* program, const orca::Route* op) { program->operators.emplace_back(*op); }
void orca_add_grouped(Program* program, const orca::Grouped* op) { program->operators.emplace_back(*op); }
void orca_add_combine(Program* program, const orca::Combine* op) { program->operators.emplace_back(*op); }
void orca_add_convolve(Program* program, const orca::Convolve* op) { program->operators.emplace_back(*op); }
void orca_add_scan(Program* program, const orca::Scan* op) { program->operators.emplace_back(*op); }
void orca_add_gate(Program* program, const orca::Gate* op) { program->operators.emplace_back(*op); }

// A rank's view of the memory in which it meets the others; slots have `slot_size` floats.
orca::Meeting* orca_meeting(void* memory, int rank, int num_ranks, int64_t slot_size) {
    return new orca::Meeting(memory, rank, num_ranks, slot_size);
}
void orca_free_meeting(orca::Meeting* meeting) { delete meeting; }
void orca_join(Program* program, orca::Meeting* meeting) { program->meeting = meeting; }
void orca_abort(orca::Meeting* meeting) { meeting->abort(); }

// For who carries slots between hosts; the meeting is a view as the rank that is waited, or stood in, for.
int64_t orca_await(orca::Meeting* meeting, uint32_t number) { return meeting->await(number); }
void orca_arrive(orca::Meeting* meeting, uint32_t number, int64_t num_floats) { meeting->arrive(number, num_floats); }

// Meet: `size` floats of each rank are to be had by all. Returns the number of the first float of rank 0, counted from the
// first slot's; -1: aborted. Rank r's are r slots further on.
int64_t orca_exchange(orca::Meeting* meeting, const float* own, int64_t size) {
    const uint32_t number = meeting->next++;
    std::memcpy(meeting->slot(number, meeting->rank), own, size * sizeof(float));
    meeting->arrive(number, size);
    return meeting->wait(number) ? meeting->slot(number, 0) - meeting->slot(0, 0) : -1;
}

// Rows `ids` of a matrix in codes, [count][K]; returns how many were looked up before one that there is not.
int32_t orca_look_up(const orca::Codes* matrix, const int64_t* ids, int32_t count, float* out) {
    for (int32_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= matrix->rows) return i;
        orca::look_up(*matrix, ids[i], out + (int64_t)i * matrix->K);
    }
    return count;
}
// Whether this machine multiplies pairs of bf16 in one instruction.
int orca_has_pairs() {
    return orca::HAS_PAIRS;
}

// Whether it has AMX, and the kernel lets us use it.
int orca_has_amx() { return orca::has_amx(); }

// Whether the cache of a model with heads of that size stands in pairs of bf16.
int orca_attends_in_pairs(int head_dim) { return orca::attends_in_pairs(head_dim); }

// Whether the program ran to its end: 0, where another rank is gone.
int orca_run(Program* program, const orca::Batch* batch) { return program->run(*batch); }

// Pack [N, K], row by row, as panels `first`, `first + stride`, ... of a packed matrix; missing columns are 0.
void orca_pack(const void* from, void* to, int size, int N, int K, int panels, int stride, int first) {
    if (size == 4) orca::pack((const uint32_t*)from, (uint32_t*)to, N, K, panels, stride, first);
    if (size == 2) orca::pack((const uint16_t*)from, (uint16_t*)to, N, K, panels, stride, first);
    if (size == 1) orca::pack((const uint8_t*)from, (uint8_t*)to, N, K, panels, stride, first);
}
}
MLSYS_FUNCTIONS(
    orca_program, orca_free, orca_add_gemm, orca_add_attention, orca_add_gather_rows, orca_add_normalise, orca_add_reduce,
    orca_add_route, orca_add_grouped, orca_add_combine, orca_add_convolve, orca_add_scan, orca_add_gate, orca_meeting, orca_free_meeting, orca_join, orca_abort, orca_await, orca_arrive, orca_exchange, orca_look_up, orca_has_pairs,
    orca_has_amx, orca_attends_in_pairs, orca_run, orca_pack);

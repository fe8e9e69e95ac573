// A decoder's iteration as a list of operators, and the threads that run it.
//
// The operators work on registers, fp32 matrices [rows, width]. Each is one parallel loop, or two where its rows must be
// prepared first. Layers run without a return to Python in between.
#pragma once

#include <chrono>
#include <variant>

#include "attending.h"
#include "attention_in_floats.h"
#include "attention_in_pairs.h"
#include "products.h"
#include "row_operators.h"

namespace orca {

class Program {
  public:
    Program(int threads, int spins, int num_registers, const int32_t* widths)
        : state(threads, spins, num_registers), owned(num_registers) {
        for (int i = 0; i < num_registers; i++) state.registers[i].stride = state.registers[i].width = widths[i];
    }

    std::vector<std::variant<Gemm, Attention, Normalise, GatherRows, Reduce, Route, Grouped, Combine, Convolve, Scan, Gate>> operators;

    void join(Meeting* meeting) { state.meeting = meeting; }

    // Returns whether it ran to its end: false, where a meeting was aborted.
    bool run(const Batch& what) {
        state.batch = &what;
        choose_forms();
        state.registers.front().floats = what.states;
        state.registers.back().floats = what.logits;
        state.registers.back().stride = what.logits_stride;
        for (size_t i = 1; i + 1 < state.registers.size(); i++)
            state.registers[i].floats = owned[i].grow((int64_t)(what.num_rows + AMX_TILE_ROWS) * state.registers[i].width);
        state.prepared = owned[0].grow(room_of_prepared());
        divide_spans();
        if (what.largest)
            for (auto& own : state.peaks) own.assign(what.num_sampled, Peak());
        state.pool.run([](void* self, int thread) { ((Program*)self)->execute(thread); }, this);
        if (state.meeting) state.meeting->next = meetings_ended;
        for (int row = 0; what.largest && row < what.num_sampled; row++) {
            Peak most;
            for (auto& own : state.peaks) most = std::max(most, own[row]);
            what.largest[row] = most.column;
            if (what.peaks) what.peaks[row] = most.value;
        }
        return !state.meeting || !state.meeting->is_aborted();
    }

  private:
    // The register that a product fills: its rank's slot of the next meeting, where it is a part of a sum.
    Register target_of(const Gemm& op, uint32_t number) const {
        Register target = state.registers[op.target];
        if (op.is_partial) {
            target.floats = state.meeting->slot(number, state.meeting->rank);
            target.is_bf16 = false;
        }
        return target;
    }

    // Floats of the rows that the largest product has prepared; makes room for routings, too.
    int64_t room_of_prepared() {
        const int rows = state.batch->num_rows;
        int64_t most = 0;
        for (auto& op : operators)
            if (auto* gemm = std::get_if<Gemm>(&op)) {
                most = std::max(most, (int64_t)(rows + AMX_TILE_ROWS) * gemm->matrix.K);
            } else if (auto* route = std::get_if<Route>(&op)) {
                if ((int)state.routings.size() <= route->routing) state.routings.resize(route->routing + 1);
                state.routings[route->routing].grow(*route, rows);
            } else if (auto* grouped = std::get_if<Grouped>(&op)) {
                const int each = grouped->rows_of == PARTS ? grouped->count : state.routings[grouped->routing].num_chosen;
                most = std::max(most, ((int64_t)rows * each + AMX_TILE_ROWS) * grouped->gemm.matrix.K);
            }
        return most;
    }

    // A register that only GEMMs of pairs read, as it is, holds what they would make of it: bf16.
    void choose_forms() {
        for (size_t i = 1; i + 1 < state.registers.size(); i++) state.registers[i].is_bf16 = true;
        for (auto& op : operators) {
            auto* grouped = std::get_if<Grouped>(&op);
            if (auto* gemm = grouped ? &grouped->gemm : std::get_if<Gemm>(&op)) {
                if (!gemm->matrix.is_in_pairs() || gemm->norm.kind != NO_NORM || (grouped && grouped->rows_of != ENTRIES))
                    state.registers[gemm->source].is_bf16 = false;
                if (gemm->accumulates || gemm->is_partial) state.registers[gemm->target].is_bf16 = false;
            } else if (auto* route = std::get_if<Route>(&op)) {
                state.registers[route->source].is_bf16 = false;
            } else if (auto* combine = std::get_if<Combine>(&op)) {
                for (int which : {combine->source, combine->target, combine->shared, combine->gate})
                    if (which >= 0) state.registers[which].is_bf16 = false;
            } else if (auto* attention = std::get_if<Attention>(&op)) {
                state.registers[attention->source].is_bf16 = false;
            } else if (auto* normalise = std::get_if<Normalise>(&op)) {
                state.registers[normalise->source].is_bf16 = state.registers[normalise->target].is_bf16 = false;
            } else if (auto* reduce = std::get_if<Reduce>(&op)) {
                state.registers[reduce->target].is_bf16 = false;
            } else if (auto* convolve = std::get_if<Convolve>(&op)) {
                state.registers[convolve->source].is_bf16 = state.registers[convolve->target].is_bf16 = false;
            } else if (auto* scan = std::get_if<Scan>(&op)) {
                state.registers[scan->steps].is_bf16 = state.registers[scan->target].is_bf16 = false;
            } else if (auto* gate = std::get_if<Gate>(&op)) {
                state.registers[gate->gate].is_bf16 = state.registers[gate->target].is_bf16 = state.registers[gate->source].is_bf16 = false;
            }
        }
    }

    // Which request each row belongs to, and what each attention's threads do.
    void divide_spans() {
        state.span_of_row.resize(state.batch->num_rows);
        for (int s = 0; s < state.batch->num_spans; s++)
            for (int row = state.batch->spans[s].start; row < state.batch->spans[s].stop; row++) state.span_of_row[row] = s;
        plans.clear();
        plan_of.assign(operators.size(), 0);
        int64_t most = 0;
        for (size_t i = 0; i < operators.size(); i++)
            if (auto* op = std::get_if<Attention>(&operators[i])) {
                size_t& at = plan_of[i];
                while (at < plans.size() && !plans[at].is_for(*op)) at++;
                if (at == plans.size()) {
                    const bool by_amx = state.batch->cache == PAIRS && attends_by_amx(op->head_dim);
                    plans.emplace_back(*op, *state.batch, state.span_of_row, by_amx ? AMX_MR : TILE_QUERIES, state.pool.size);
                }
                most = std::max(most, plans[at].num_floats);
            }
        state.pieces.grow(most);
    }

    void execute(int thread) {
        using Clock = std::chrono::steady_clock;
        double* seconds = thread ? nullptr : state.batch->seconds;
        AmxTiles tiles;
        int rows = state.batch->num_rows;
        uint32_t number = state.meeting ? state.meeting->next : 0;  // counted by each thread: a late one may be some meetings behind
        for (auto& op : operators) {
            const auto begin = seconds ? Clock::now() : Clock::time_point();
            if (auto* gemm = std::get_if<Gemm>(&op)) {
                if (is_by_amx(*gemm)) tiles.for_gemm();
                run_gemm(state, *gemm, thread, rows, target_of(*gemm, number));
            } else if (auto* attention = std::get_if<Attention>(&op)) {
                if (state.batch->cache == PAIRS) tiles.for_attention();
                const AttentionPlan& plan = plans[plan_of[&op - operators.data()]];
                switch (state.batch->cache) {
                    case FLOATS: run_attention<InFloats<float>>(state, *attention, plan, thread); break;
                    case HALVES: run_attention<InFloats<uint16_t>>(state, *attention, plan, thread); break;
                    case FP16: run_attention<InFloats<half>>(state, *attention, plan, thread); break;
                    case CODES: run_attention<InFloats<int8_t>>(state, *attention, plan, thread); break;
                    case PAIRS:
                        attends_by_amx(attention->head_dim) ? run_attention<ByAmx>(state, *attention, plan, thread)
                                                            : run_attention<ByInstruction>(state, *attention, plan, thread);
                        break;
                }
            } else if (auto* normalise = std::get_if<Normalise>(&op)) {
                run_normalise(state, *normalise, thread, rows);
            } else if (auto* reduce = std::get_if<Reduce>(&op)) {
                run_reduce(state, *reduce, thread, rows, number++);
            } else if (auto* route = std::get_if<Route>(&op)) {
                run_route(state, *route, thread, rows);
            } else if (auto* grouped = std::get_if<Grouped>(&op)) {
                if (is_by_amx(grouped->gemm)) tiles.for_gemm();
                run_grouped(state, *grouped, thread, rows, target_of(grouped->gemm, number));
            } else if (auto* combine = std::get_if<Combine>(&op)) {
                run_combine(state, *combine, thread, rows);
            } else if (auto* convolve = std::get_if<Convolve>(&op)) {
                run_convolve(*convolve, state.pool, thread, *state.batch, state.registers);
            } else if (auto* scan = std::get_if<Scan>(&op)) {
                run_scan(*scan, state.pool, thread, *state.batch, state.registers, state.own_memory[thread].rows);
            } else if (auto* gate = std::get_if<Gate>(&op)) {
                run_gate(state, *gate, thread, rows);
            } else {
                run_gather_rows(state, std::get<GatherRows>(op), thread);
                rows = state.batch->num_sampled;
            }
            if (seconds) *seconds++ += std::chrono::duration<double>(Clock::now() - begin).count();
        }
        if (state.meeting && !thread) meetings_ended = number;
    }

    Run state;
    std::vector<Scratch> owned;        // registers' memory; index 0 is the prepared rows'
    uint32_t meetings_ended = 0;       // number of the meeting after the last of this run
    std::vector<AttentionPlan> plans;  // of this iteration's attentions, alike ones once
    std::vector<size_t> plan_of;       // by operator
};

}  // namespace orca

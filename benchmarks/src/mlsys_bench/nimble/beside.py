"""The suite ``nimble-beside``: calls in company, by median and 99th percentile, beside the best peer's in the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsys_bench.harness.child import run_in_child
from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.harness.race import Case, Outcome, Outcomes, admit, fastest, speed_up, timed
from mlsys_bench.harness.text import geometric_mean, status_of, times, untimed
from mlsys_bench.nimble.summary import EAGER_TIMES, OURS, PEERS, TOLERANCE

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section
    from mlsys_nimble.nets.blocks import Net

    from mlsys_bench.nimble.company import Call, Company

NETS = ("mlp", "gru", "resnet20-cifar", "mobilenet-v2", "resnet50", "minilm-l6")
QUICK_NETS = ("mlp", "resnet20-cifar", "mobilenet-v2")
SECONDS, QUICK_SECONDS = 30.0, 6.0  # of turns for each net in each company
TURN_S = 0.3  # several time slices of the system's


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net in each company of :data:`mlsys_bench.nimble.company.COMPANIES`.

    Args:
        context: The suite's context.
        nets: As for the suite ``nimble``; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: As for the suite ``nimble``.
        trust_code: Let ``.pt2`` files run code that they hold.

    Raises:
        InvalidInputError: ``peers`` has no Python, or a net is not there; nothing has run.
        MlsysError: a race ended without outcomes.
    """
    from mlsys_bench.nimble.nets import race_settings

    settings = race_settings(context, nets or (QUICK_NETS if context.is_quick else NETS), peers, trust_code)
    races: dict[str, dict[str, Outcomes]] = {}
    with LoadMeter() as meter, context.console.status("") as status:
        for name in settings.nets:
            budget_s = QUICK_SECONDS if context.is_quick else SECONDS
            arguments = settings.arguments(name) | {"budget_s": budget_s, "turn_s": TURN_S}
            found = run_in_child(
                "mlsys_bench.nimble.beside:race_net",
                arguments,
                python=settings.python,
                env=settings.env,
                say=status.update,
            )
            races[name] = {
                company: {case: Outcome(**fields) for case, fields in outcomes.items()}
                for company, outcomes in found.items()
            }
    return report(races, context.num_threads, str(meter.load))


def race_net(
    model: str, num_threads: int, budget_s: float, turn_s: float, is_quick: bool, cache_dir: str, trust_code: bool
) -> dict[str, dict[str, Any]]:
    """Race all cases on one net in each company, in this process; return the fields of the outcomes."""
    from mlsys_bench.nimble.company import COMPANIES, NUM_CALLERS
    from mlsys_bench.nimble.nets import makers_of

    net, makers = makers_of(model, num_threads, is_quick, cache_dir, trust_code, num_callers=NUM_CALLERS)
    names = tuple(company.name for company in COMPANIES)
    found = race_in(names, model, net, makers, num_threads, budget_s=budget_s, turn_s=turn_s)
    return {company: {name: asdict(one) for name, one in outcomes.items()} for company, outcomes in found.items()}


def race_in(
    names: Sequence[str],
    model: str,
    net: Net,
    makers: Mapping[str, Callable[[], Case]],
    num_threads: int,
    *,
    budget_s: float,
    turn_s: float,
) -> dict[str, dict[str, Outcome]]:
    """Make the cases ready once, and time those that are right in each of the named companies."""
    import torch

    from mlsys_bench.nimble.company import COMPANIES, other_pools
    from mlsys_bench.nimble.nets import exact_results, relative_difference

    with torch.no_grad():
        outcomes, ready = admit(
            makers,
            difference=relative_difference,
            expected=exact_results(net),
            tolerance=TOLERANCE,
            slack=EAGER_TIMES,
            say=lambda step: print(f"{model}: {step}", flush=True),
        )
        companies = [company for company in COMPANIES if company.name in names]
        stir = other_pools(num_threads)[0] if any(company.has_pools for company in companies) else lambda: None
        found: dict[str, dict[str, Outcome]] = {}
        for company in companies:
            print(f"{model}: {len(ready)} cases, {company.name}", flush=True)
            turns = measure(ready, company, stir, budget_s=budget_s, turn_s=turn_s)
            found[company.name] = outcomes | {name: timed(outcomes[name], turns[name]) for name in turns}
    return found


def measure(
    ready: Mapping[str, Case], company: Company, stir: Call, *, budget_s: float, turn_s: float
) -> dict[str, list[list[float]]]:
    """Time the cases in turns in a company; return the seconds of each call, turn by turn."""
    from mlsys_core.profiling.turns import rounds, take_turns

    from mlsys_bench.nimble.company import call_together, keep

    with keep(company, stir) as before:
        if company.num_callers == 1:
            calls = {name: case.call for name, case in ready.items()}
            return take_turns(calls, turn_s=turn_s, num_rounds=4, budget_s=budget_s, before=before)
        turns: dict[str, list[list[float]]] = {name: [] for name in ready}
        for names in rounds(list(ready), num_rounds=4, budget_s=budget_s):
            for name in names:
                turns[name].append(call_together(ready[name].call, company.num_callers, turn_s))
        return turns


def p99(outcome: Outcome | None) -> float | None:
    """Return the 99th percentile of a call's seconds, or None if it was not timed."""
    return float(np.percentile(outcome.samples_s, 99)) if outcome is not None and outcome.turns_s else None


def ratios(outcomes: Outcomes) -> tuple[float | None, float | None]:
    """Return the best peer's median over Nimble's, and the least 99th percentile of a peer over Nimble's."""
    ours = outcomes.get(OURS)
    tails = [tail for name in PEERS if (tail := p99(outcomes.get(name))) is not None]
    own = p99(ours)
    tail = min(tails) / own if tails and own else None
    return speed_up(ours, outcomes.get(fastest(outcomes, PEERS) or "")), tail


def report(races: Mapping[str, Mapping[str, Outcomes]], num_threads: int, load: str) -> Section:
    """Return a table with the losses first, the geometric means by company, and all figures as data."""
    from mlsys_core.report import Section, Table

    flat = {(net, company): outcomes for net, found in races.items() for company, outcomes in found.items()}
    by_loss = sorted(flat, key=lambda key: min((ratio for ratio in ratios(flat[key]) if ratio), default=0.0))
    rows = []
    for key in by_loss:
        outcomes = flat[key]
        peer, over = fastest(outcomes, PEERS), ratios(outcomes)
        rows.append(
            [*key, peer or "-", *_both(outcomes.get(peer or "")), *_both(outcomes.get(OURS)), *map(times, over)]
        )
    columns = ["net", "company", "best peer", "its p50", "its p99", "Nimble p50", "p99", "p50 over", "p99 over"]
    body: list[Any] = [Table(columns, rows, "Milliseconds a call, and the best peer's over Nimble's, losses first")]
    for company in dict.fromkeys(company for _, company in flat):
        pairs = [ratios(outcomes) for (_, where), outcomes in flat.items() if where == company]
        p50, tail = (geometric_mean(column) for column in zip(*pairs, strict=True))
        body.append(
            f"{company}: {times(p50)} the best peer's speed by the median, {times(tail)} by the 99th percentile."
        )
    named = {f"{net}, {company}": outcomes for (net, company), outcomes in flat.items()}
    body += [load, *untimed({net: next(iter(found.values())) for net, found in races.items()})]
    data = {net: {company: _data(outcomes) for company, outcomes in found.items()} for net, found in races.items()}
    found_data = {"num_threads": num_threads, "tolerance": TOLERANCE, "load": load, "nets": data}
    return Section("Nimble in company", body, status=status_of(named, OURS), data=found_data)


def _both(outcome: Outcome | None) -> tuple[str, str]:
    median, tail = (outcome.median_s if outcome else None), p99(outcome)
    return tuple("-" if s is None else f"{s * 1e3:.3g}" for s in (median, tail))  # type: ignore[return-value]


def _data(outcomes: Outcomes) -> dict[str, Any]:
    over_p50, over_p99 = ratios(outcomes)
    cases = {name: {**one.to_json(), "p99_s": p99(one)} for name, one in outcomes.items()}
    return {"cases": cases, "over_best_peer": over_p50, "p99_over_best_peer": over_p99}

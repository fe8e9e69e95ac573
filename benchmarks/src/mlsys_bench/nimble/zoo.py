"""The suite ``nimble-zoo``: nets that nobody tuned for, alone and in company, beside the peers at their best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.errors import MlsysError
from mlsys_core.profiling.turns import take_turns
from mlsys_core.report import Section, Table

from mlsys_bench.harness.machine import busy_processes
from mlsys_bench.harness.race import Outcome, Outcomes, admit, fastest, speed_up, timed
from mlsys_bench.harness.text import geometric_mean, status_of, times, untimed
from mlsys_bench.nimble import EAGER_TIMES, OURS, PEERS, TOLERANCE
from mlsys_bench.nimble.cases import SLOW_TO_PREPARE, ZOO_MAKERS, left_out_of_quick
from mlsys_bench.nimble.races import exact_results, race_each, race_settings, relative_difference, subject_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

_HERE = "mlsys_bench.nimble.zoo_nets"
NAMED = (  # twelve that earlier measurements named
    *(f"{_HERE}:tower", f"{_HERE}:randwire", f"{_HERE}:gcn", "gru", "torchvision:googlenet"),
    *("torchvision:convnext_tiny", "torchvision:vit_b_16", "torchvision:shufflenet_v2_x1_0"),
    *("torchvision:regnet_y_400mf", "torchvision:densenet121", "torchvision:squeezenet1_1", "torchvision:mnasnet1_0"),
)
FORTY = (  # one or two of each family
    *(f"torchvision:{name}" for name in ("alexnet", "vgg11", "resnet18", "resnext50_32x4d", "wide_resnet50_2")),
    *(f"torchvision:{name}" for name in ("mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_v2_s")),
    *(f"torchvision:{name}" for name in ("swin_t", "swin_v2_t", "maxvit_t", "regnet_x_800mf", "inception_v3")),
    *(f"timm:{name}" for name in ("resnet26d", "res2net50_26w_4s", "seresnet50", "ecaresnet26t", "skresnet18")),
    *(f"timm:{name}" for name in ("dla34", "hrnet_w18_small", "cspdarknet53", "vovnet39a", "darknet53", "dpn68")),
    *(f"timm:{name}" for name in ("ghostnet_100", "hardcorenas_a", "tf_efficientnet_lite0", "fbnetc_100")),
    *(f"timm:{name}" for name in ("mobilevit_xs", "edgenext_small", "convmixer_768_32", "convnextv2_atto")),
    *(f"timm:{name}" for name in ("deit_tiny_patch16_224", "vit_small_patch32_224", "levit_128s", "pit_ti_224")),
    *(f"timm:{name}" for name in ("mixer_s32_224", "poolformer_s12", "xcit_nano_12_p16_224", "coat_tiny")),
)
NETS = (*NAMED, *FORTY)
COMPANY = {"alone": 0, "one busy process a core": 1}  # busy processes on each core, at equal priority
SECONDS, QUICK_SECONDS = 20.0, 4.0  # of turns for each net in each company
TURN_S = 0.1
NAME = "nimble-zoo"


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net in each company of :data:`COMPANY`.

    Results are written after each net. A run that was cut goes on from ``nimble-zoo.jsonl`` in the context's folder.

    Args:
        context: The suite's context; quick: without the two that compile for minutes.
        nets: As for the suite ``nimble``; none: :data:`NETS`.
        peers: As for the suite ``nimble``.
        trust_code: As for the suite ``nimble``.

    Raises:
        InvalidInputError: ``peers`` has no Python, a net is not there, or the journal is of another commit, number of
            threads or time; nothing has run.
    """
    from mlsys_core.bench import write_results  # not at the top: the peers' environment has no pluggy

    settings = race_settings(context, nets or NETS, peers, trust_code)
    budget_s = QUICK_SECONDS if context.is_quick else SECONDS
    races: dict[str, dict[str, Outcomes]] = {}
    loads: dict[str, str] = {}
    for name, record in race_each(context, NAME, f"{__name__}:race_net", settings, budget_s=budget_s):
        title = _title(name)
        if isinstance(record, MlsysError):  # of some fifty nets the others go on
            races[title] = {next(iter(COMPANY)): {OURS: Outcome("does not run", str(record))}}
            continue
        loads[title] = record["load"]
        races[title] = {
            company: {case: Outcome(**fields) for case, fields in outcomes.items()}
            for company, outcomes in record["found"].items()
        }
        write_results(NAME, report(races, context.num_threads, loads), context)
    return report(races, context.num_threads, loads)


def race_net(model: str, budget_s: float, is_quick: bool, **setup: Any) -> dict[str, dict[str, Any]]:
    """Race on one net in each company, in this process; return the fields of the outcomes by company and case."""
    subject = subject_of(model, **setup)
    found: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        outcomes, ready = admit(
            {
                name: partial(left_out_of_quick if is_quick and name in SLOW_TO_PREPARE else make, subject)
                for name, make in ZOO_MAKERS.items()
            },
            difference=relative_difference,
            expected=exact_results(subject.net),
            tolerance=TOLERANCE,
            slack=EAGER_TIMES,
            say=lambda step: print(f"{model}: {step}", flush=True),
        )
        calls = {name: case.call for name, case in ready.items()}
        for company, per_core in COMPANY.items():
            print(f"{model}: {len(ready)} cases, {company}", flush=True)
            with busy_processes(per_core):
                turns = take_turns(calls, turn_s=TURN_S, num_rounds=4, budget_s=budget_s)
            all_outcomes = outcomes | {name: timed(outcomes[name], own) for name, own in turns.items()}
            found[company] = {name: asdict(one) for name, one in all_outcomes.items()}
    return found


def ratios(outcomes: Outcomes) -> tuple[float | None, float | None]:
    """Return the best peer's time over Nimble's, by medians within rounds and by the least time of a call."""
    ours = outcomes.get(OURS)
    least = [one.least_s for name in PEERS if (one := outcomes.get(name)) is not None and one.least_s is not None]
    own = ours.least_s if ours is not None else None
    return speed_up(ours, outcomes.get(fastest(outcomes, PEERS) or "")), min(least) / own if least and own else None


def report(races: Mapping[str, Mapping[str, Outcomes]], num_threads: int, loads: Mapping[str, str]) -> Section:
    """Return a table with the losses first, the geometric means by company, and all figures as data.

    ``loads`` has what else the machine did during each net's race.
    """
    flat = {(net, company): outcomes for net, found in races.items() for company, outcomes in found.items()}
    rows = []
    for key in sorted(flat, key=lambda key: ratios(flat[key])[0] or 0.0):
        outcomes = flat[key]
        peer = fastest(outcomes, PEERS)
        cells = [_both(outcomes.get(name)) for name in (peer or "", OURS)]
        rows.append([*key, peer or "-", *cells, *map(times, ratios(outcomes))])
    columns = ["net", "company", "best peer", "its ms (least)", "Nimble's", "over", "by least"]
    body: list[Any] = [Table(columns, rows, "Median milliseconds a call (the least), losses first")]
    means: dict[str, dict[str, float | None]] = {}
    for company in dict.fromkeys(company for _, company in flat):
        pairs = [ratios(outcomes) for (_, where), outcomes in flat.items() if where == company]
        median, least = (geometric_mean(column) for column in zip(*pairs, strict=True))
        means[company] = {"over_best_peer": median, "least_over_best_peer": least}
        short = sum(pair[0] is not None and pair[0] < 0.95 for pair in pairs)
        body.append(
            f"{company}: {times(median)} the best peer's speed by the median, {times(least)} by the least, geometric "
            f"means; {short} of {len(pairs)} nets below .95."
        )
    body += [f"During the last race, {net}: {load}" for net, load in [*loads.items()][-1:]]
    body += untimed({net: next(iter(found.values())) for net, found in races.items()})
    data = {net: {company: _data(outcomes) for company, outcomes in found.items()} for net, found in races.items()}
    setting = {"num_threads": num_threads, "tolerance": TOLERANCE}
    found_data = {**setting, "loads": dict(loads), "means": means, "nets": data}
    named = {f"{net}, {company}": outcomes for (net, company), outcomes in flat.items()}
    status = status_of(named, OURS, ("differs", "does not run"))
    return Section("Nets nobody named", body, status=status, data=found_data)


def _title(model: str) -> str:
    return model.removeprefix(f"{_HERE}:")


def _both(outcome: Outcome | None) -> str:
    if outcome is None or outcome.median_s is None or outcome.least_s is None:
        return "-"
    return f"{outcome.median_s * 1e3:.3g} ({outcome.least_s * 1e3:.3g})"


def _data(outcomes: Outcomes) -> dict[str, Any]:
    median, least = ratios(outcomes)
    cases = {name: one.to_json() for name, one in outcomes.items()}
    return {"cases": cases, "over_best_peer": median, "least_over_best_peer": least}

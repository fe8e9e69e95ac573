"""The suite ``windtunnel-public``: is fine-tuning above a *tuned* pipeline of boosted trees, and never below it?

Eight public sets that packages carry. ``tuned`` is a LightGBM pipeline whose options a random search chose on three
folds of the training rows, with early stopping, fitted on all of them; ``fine-tuned`` the estimator's default that
begins with it; ``members`` the same with refits beside its trees. XGBoost, CatBoost, RealMLP and TabM take part where
they are installed. Each finished fit is a line of a journal, so that a run goes on where it was stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Section, Table

from mlsys_bench.harness.journal import Journal
from mlsys_bench.windtunnel.public_models import CONTESTANTS, MEMBERS, PEERS, fit_and_score, missing_peers
from mlsys_bench.windtunnel.public_sets import SETS, check_sets

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

NAME = "windtunnel-public"


def run(
    context: BenchContext,
    *,
    seeds: int = 5,
    first_seed: int = 0,
    rows: int = 2_000,
    trials: int = 6,
    data: tuple[str, ...] = (),
    peer_seeds: int = 1,
) -> Section:
    """Fit on each set and score other rows: AUC of classes, R2 of numbers.

    Args:
        context: The suite's context; quick has one seed, 600 rows, one trial, two members and no peers.
        seeds: Number of splits and draws of rows.
        first_seed: The first of them; the others follow.
        rows: Training rows at most; five times as many test rows at most.
        trials: Options that the search tries; the first are LightGBM's own.
        data: Sets; all if none.
        peer_seeds: Seeds of the peers that are installed.
    """
    import torch

    check_sets(data)
    members = MEMBERS
    if context.is_quick:
        seeds, rows, trials, peer_seeds, members = 1, 600, 1, 0, 2
    torch.set_num_threads(context.num_threads)
    setting = {"rows": rows, "trials": trials, "members": members}
    journal = Journal(context.output_dir / f"{NAME}{'-quick' if context.is_quick else ''}.jsonl", setting, key="fit")
    absent = missing_peers()
    for seed in range(first_seed, first_seed + seeds):
        peers = [peer for peer in PEERS if peer not in absent] if seed < first_seed + peer_seeds else []
        for name in data or SETS:
            for contestant in (*CONTESTANTS, *peers):
                key = f"{name}/{seed}/{contestant}"
                if key in journal.finished:
                    continue
                options = journal.finished.get(f"{name}/{seed}/tuned", {}).get("options", {})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = fit_and_score(contestant, name, seed, setting, options, num_threads=context.num_threads)
                journal.add({"fit": key, **found})
                shown = f"{key}: {found['score']:.4f}, {found['seconds']:.0f} s"
                context.console.print(shown, highlight=False, markup=False)
    results = summary(journal.finished)
    caption = f"{rows:,} training rows at most, {trials} trials; AUC, R2 where a number is predicted"
    missing = [f"Not run here: {', '.join(absent)} (not installed)"] if absent else []
    return Section(
        "WindTunnel: beside tuned pipelines",
        [
            Table(["set", "contestant", "seeds", "score", "above tuned, points", "lowest"], _rows(results), caption),
            *missing,
        ],
        data={"results": results, **setting},
    )


def summary(finished: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by set and contestant the records by seed, and the gains over ``tuned`` in points."""
    found: dict[str, dict[str, Any]] = {name: {} for name in SETS}
    for key, record in finished.items():
        name, seed, contestant = key.split("/")
        facts = found[name].setdefault(contestant, {"seeds": {}})
        facts["seeds"][seed] = {field: value for field, value in record.items() if field != "fit"}
    for contestants in found.values():
        for facts in contestants.values():
            tuned = contestants["tuned"]["seeds"]
            gains = [100 * (each["score"] - tuned[seed]["score"]) for seed, each in facts["seeds"].items()]
            facts["gain"] = _gain(gains)
    return {name: contestants for name, contestants in found.items() if contestants}


def _gain(gains: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of gains, its standard error over the seeds, and the lowest of a seed."""
    import numpy as np

    error = float(np.std(gains, ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else None
    return {"mean": float(np.mean(gains)), "se": error, "lowest": float(min(gains))}


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for name, contestants in results.items():
        for contestant, facts in contestants.items():
            gain, scores = facts["gain"], [each["score"] for each in facts["seeds"].values()]
            cells = [f"{gain['mean']:+.2f}" + ("" if gain["se"] is None else f" ± {gain['se']:.2f}")]
            cells = ["", ""] if contestant == "tuned" else [*cells, f"{gain['lowest']:+.2f}"]
            rows.append([name, contestant, str(len(scores)), f"{sum(scores) / len(scores):.4f}", *cells])
    return rows

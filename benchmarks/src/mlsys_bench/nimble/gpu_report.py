"""The report of the races on a CUDA device: ours beside what the paper measured on a V100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlsys_core.report import Section, Table

from mlsys_bench.harness.race import Outcome, speed_up
from mlsys_bench.harness.text import milliseconds, status_of, times, untimed

OVER_EAGER = {"nasnet-mobile": 22.34}  # section 3.4.1; the text of the dissertation gives no other bar of figure 3.8
OVER_SINGLE = {"inception-v3": 1.09, "darts": 1.37, "amoebanet": 1.45, "nasnet-mobile": 1.88, "nasnet-large": 1.31}
BEST_TRAINING = 3.61  # section 3.4.3: the most of any net at CIFAR's size


@dataclass(frozen=True, slots=True)
class Race:
    """Outcomes of all cases on one net."""

    net: str
    is_training: bool
    outcomes: dict[str, Outcome]

    def ratio(self, case: str, over: str) -> float | None:
        """Return how many times faster one case is than another; None if one of them was not timed."""
        return speed_up(self.outcomes.get(case), self.outcomes.get(over))


def report(races: Sequence[Race], *, device: str) -> Section:
    """Return four tables, a line for each case that was not timed, and everything as data."""
    inference = [race for race in races if not race.is_training]
    training = [race for race in races if race.is_training]
    by_net = {race.net: race.outcomes for race in races}
    body: list[Any] = [
        _table("Inference at batch 1 (figure 3.8)", inference, {net: f"{value}x" for net, value in OVER_EAGER.items()}),
        _streams(inference),
        _table(f"Training at batch 32 (figure 3.9; the paper's best is {BEST_TRAINING}x)", training, {}),
        _memory(races),
        *untimed(by_net),
    ]
    data = {"device": device, "races": [_data(race) for race in races]}
    return Section(f"Nimble on {device}", body, status=status_of(by_net, "Nimble"), data=data)


def _table(caption: str, races: Sequence[Race], paper: dict[str, str]) -> Table:
    names = list(dict.fromkeys(name for race in races for name in race.outcomes))
    columns = ["net", *(f"{name}, ms" for name in names), "over eager", "over reduce-overhead", "the paper, over eager"]
    rows = [
        [
            race.net,
            *(milliseconds(race.outcomes.get(name)) for name in names),
            times(race.ratio("Nimble", "eager")),
            times(race.ratio("Nimble", "reduce-overhead")),
            paper.get(race.net, ""),
        ]
        for race in races
    ]
    return Table(columns, rows, caption)


def _streams(races: Sequence[Race]) -> Table:
    rows = [
        [race.net, times(race.ratio("Nimble", "Nimble, one stream")), f"{OVER_SINGLE[race.net]}x"]
        for race in races
        if race.net in OVER_SINGLE
    ]
    return Table(["net", "several streams over one", "the paper"], rows, "Several streams (table 3.1)")


def _memory(races: Sequence[Race]) -> Table:
    names = list(dict.fromkeys(name for race in races for name in race.outcomes))
    rows = [
        [race.net, *(race.outcomes[name].note if name in race.outcomes else "-" for name in names)] for race in races
    ]
    return Table(["net", *names], rows, "What each added to the device's reserved memory, beside the net's own copy")


def _data(race: Race) -> dict[str, Any]:
    outcomes = {name: one.to_json() for name, one in race.outcomes.items()}
    return {"net": race.net, "is_training": race.is_training, "outcomes": outcomes}

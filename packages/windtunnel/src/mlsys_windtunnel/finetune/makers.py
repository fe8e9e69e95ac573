"""Members of each kind, fitted: refits of boosted trees, a linear model, perceptrons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError
from sklearn.base import clone
from sklearn.pipeline import Pipeline

from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.beside import NETWORKS, Scaling, fit_linear, fit_perceptron, weight_for
from mlsys_windtunnel.modules.base import PredictorModule
from mlsys_windtunnel.modules.linear.neural import Layers
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.codes import Coded
from mlsys_windtunnel.modules.tree.heads import Mapped
from mlsys_windtunnel.modules.tree.trees import Trees

DRAWN = 0.8  # share of rows and columns that a refit's trees see, where the source's see all
# Weight of each kind where rows held out say nothing
PRIOR = {"source": 0.5, "drawn": 0.25, "random": 0.25, "linear": 0.0, "perceptrons": 0.0}
_SHARES = ("subsample", "colsample_bytree", "max_features", "rsm")  # options of boosters that say so
_SEEDS = ("random_state", "random_seed")

Part = Trees | Layers


def check_members(source: Any, members: int) -> None:
    """Look at a number of members before anything is fitted.

    Raises:
        InvalidInputError: it is no whole number of 0 or more, or the pipeline does not end in boosted trees.
    """
    if not isinstance(members, int) or members < 0:
        raise InvalidInputError(f"members is {members!r}; it must be a whole number, 0 or more")
    if not members:
        return
    last = last_of(source)
    options = last.get_params(deep=False) if hasattr(last, "get_params") else {}
    if not any(name in options for name in _SEEDS) or not any(name in options for name in _SHARES):
        raise _unfit(last)


@dataclass(frozen=True, slots=True)
class Maker:
    """Fits members of a kind on prepared columns."""

    last: Any
    members: int
    seed: int
    is_classifier: bool
    has_networks: bool  # members that are no trees

    def count(self, kind: str) -> int:
        """Return how many of a kind stand beside the source."""
        of_random = self.members // 2 if type(self.last).__module__.startswith("lightgbm") else 0
        counts = {"source": 1, "drawn": self.members - of_random, "random": of_random}
        if self.has_networks:
            counts |= {"linear": 1, "perceptrons": min(self.members, NETWORKS)}
        return counts.get(kind, 0)

    def fit(self, kind: str, count: int, prepared: Any, y: Any, weight: Any, scaling: Scaling) -> list[Part]:
        """Return fitted members."""
        if kind in ("linear", "perceptrons"):
            fit = fit_linear if kind == "linear" else fit_perceptron
            options = {"is_classifier": self.is_classifier}
            return [
                fit(scaling, prepared, y, weight, (self.seed + number) % 2**32, **options) for number in range(count)
            ]
        parts: list[Part] = []
        for number in range(count):
            seed = self.seed + number + (self.members if kind == "random" else 0)
            changed = {} if kind == "source" else drawn_options(self.last, seed)
            member = clone(self.last).set_params(**changed, **({"extra_trees": True} if kind == "random" else {}))
            member.fit(prepared, y, **weight_for(member, weight))
            parts.append(trees_of(translate(member).network, self.last))
        return parts


def answers_plain_scores(head: PredictorModule) -> bool:
    """Return whether sums of leaves are log-odds, logarithms of probabilities or numbers, as networks answer them."""
    body = getattr(head, "body", None)
    if type(body) is Mapped and body.output == "identity" and body.slope == 1:
        body = body.body
    return type(body) is Trees and getattr(head, "slope", 1.0) == 1


def last_of(source: Any) -> Any:
    """Return the last step, of pipelines within pipelines too."""
    while isinstance(source, Pipeline):
        source = source.steps[-1][1]
    return source


def drawn_options(last: Any, seed: int) -> dict[str, Any]:
    """Return the options of a refit: another seed, and rows and columns drawn where the source takes all."""
    options = last.get_params(deep=False)
    changed: dict[str, Any] = {name: seed for name in _SEEDS if name in options}
    changed |= {name: DRAWN for name in _SHARES if name in options and options[name] in (None, 1, 1.0)}
    if options.get("subsample_freq") == 0:
        changed["subsample_freq"] = 1
    return changed


def trees_of(network: Network, last: Any) -> Trees:
    """Return the only trees of a booster's translation."""
    found = [part for part in network.modules() if isinstance(part, Trees)]
    is_coded = any(isinstance(part, Coded) for part in network.modules())
    if len(found) != 1 or is_coded or found[0].divisor != 1 or len(network.operators) != 1:
        raise _unfit(last)
    return found[0]


def _unfit(last: Any) -> InvalidInputError:
    return InvalidInputError(
        f"members are refits of boosted trees over numbers, with a seed; {type(last).__name__} as it is fitted here is "
        "none such: leave members at 0, or encode categories in a step before it"
    )

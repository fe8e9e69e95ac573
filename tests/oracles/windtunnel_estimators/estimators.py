"""All estimators, translated or refused with a reason, and compared on inputs of others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate

from tests.oracles.tally import Tally

from .compare import METHODS, compare
from .inputs import of_numbers
from .sources import Source


def run(sources: Iterable[Source], tally: Tally, refusals: dict[str, str], *, every: int = 1, seed: int = 0) -> None:
    """Compare each source with its translation.

    Args:
        sources: Fitted estimators.
        tally: Where verdicts go.
        refusals: Where reasons go of what is not translated.
        every: Which share of the cases is run of those that only vary what holds the numbers.
        seed: Of random numbers, and of which cases are left out.
    """
    rng = np.random.default_rng(seed)
    for source in sources:
        if source.x is None:
            refusals[source.name] = f"not fitted: {source.reason}"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = translate(source.estimator)
        except InvalidInputError as error:
            refusals[source.name] = str(error)
            continue
        except Exception as error:  # noqa: BLE001  third-party code
            tally.add("raw", source.name, f"translate: {type(error).__name__}: {error}")
            continue
        methods = [name for name in METHODS if hasattr(module, name)]
        for index, (label, x) in enumerate(of_numbers(source.x, source.names, rng)):
            if every > 1 and index % every != int(rng.integers(every)):
                continue
            for method in methods:
                where = f"{source.name}.{method}, {label}"
                if not hasattr(source.estimator, method):
                    tally.add("wrong", where, "the source has no such method")
                    continue
                if label == "generator":
                    x = iter(source.x.tolist())
                compare(source.estimator, module, method, x, where, tally)

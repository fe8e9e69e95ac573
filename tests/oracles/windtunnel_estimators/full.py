"""The whole oracle: every estimator of scikit-learn beside its translation, its checks, and random pipelines."""

from __future__ import annotations

import io
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_estimators import compose, estimators, facade, sources

PIPELINES = 160  # composed at random
PROCESSES = 2

Part = tuple[str, Tally, dict[str, str]]


def _estimators(with_names: bool) -> Part:
    tally, refusals = Tally(), {}  # type: Tally, dict[str, str]
    estimators.run(sources.all_sources(with_names=with_names), tally, refusals)
    return f"windtunnel-estimators, {'named' if with_names else 'unnamed'}", tally, refusals


def _checks(number: int) -> Part:
    tally, refusals = Tally(), {}  # type: Tally, dict[str, str]
    facade.run(sources.unfitted()[number::PROCESSES], tally, refusals)
    return f"windtunnel-estimator-checks, part {number + 1}", tally, refusals


def _pipelines(number: int) -> Part:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    tally = Tally()

    @seed(number)
    @settings(
        max_examples=PIPELINES // PROCESSES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(compose.programs())
    def run(program: object) -> None:
        compose.fit_and_compare(*program, tally, seed=number, most=25)  # type: ignore[misc]

    run()
    return f"windtunnel-pipelines, part {number + 1}", tally, {}


def _quiet(job: tuple[str, object]) -> Part:
    """Run a part without what LightGBM prints of inputs that it refuses."""
    warnings.simplefilter("ignore")
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        return {"estimators": _estimators, "checks": _checks, "pipelines": _pipelines}[job[0]](job[1])  # type: ignore


def main() -> int:
    """Print each part's tally, the faults, and the whole's; 1 if anything is wrong or raw."""
    jobs = [
        ("estimators", False),
        ("estimators", True),
        ("checks", 0),
        ("checks", 1),
        ("pipelines", 0),
        ("pipelines", 1),
    ]
    whole, refused = Tally(), {}  # type: Tally, dict[str, str]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for name, tally, refusals in pool.map(_quiet, jobs):
            print(tally.line(name), flush=True)
            for fault in tally.faults:
                print(f"  {fault}", flush=True)
            whole.counts.update(tally.counts)
            whole.faults += tally.faults
            refused |= refusals
    print(f"not translated, with the reason ({len(refused)}):")
    for source, reason in sorted(refused.items()):
        print(f"  {source}: {reason.partition('; register one')[0]}")
    print(whole.line("windtunnel-estimators"))
    return int(bool(whole.faults))


if __name__ == "__main__":
    sys.exit(main())

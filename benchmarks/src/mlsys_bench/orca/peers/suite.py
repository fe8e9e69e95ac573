"""The suite ``orca-peers``: each engine's own server, sent the same requests for the same weights.

    python -m mlsys_bench.orca.peers.models
    mlsys bench orca-peers                                all requests at once: output tokens per second
    mlsys bench orca-peers rates=1.9,4.6,6.9              Poisson arrivals: time to first token, ms per token
    mlsys bench orca-peers in_process=true loaded=true    engines without HTTP, a busy process on each core

Peers are optional, each in an environment of its own (``benchmarks/peers/install.sh``); missing ones are named. Each
case first tries its settings on a short run and keeps the best; then the cases take turns, one running at a time, and
their answers are compared with ours. A peer without a server of its own (OpenVINO GenAI) stands behind a small one of
ours, ``engines/http_front.py``. Rows in which other processes took more than a tenth of the machine tell little.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import turns
from mlsys_core.report import Section, Table

from mlsys_bench.harness.machine import LoadMeter, busy_processes
from mlsys_bench.harness.text import table_of
from mlsys_bench.orca.peers.cases import CASES, OURS, Job, PeerCase, Settings
from mlsys_bench.orca.peers.models import DTYPES, FOLDER, MODELS, PEERS
from mlsys_bench.orca.peers.report import Run, problems_of, rows_of, score_of
from mlsys_bench.orca.peers.runners import NotReadyError, running
from mlsys_bench.orca.peers.traffic import Traffic, make_traffic

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext


WARMUP_SEED, TUNING_SEED, SEED = 1, 2, 3
QUICK_SETTINGS = 3  # of each case, that a quick run tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests, fronts and turns of a run."""

    model: str
    dtype: str
    threads: int
    rates: tuple[float, ...]  # requests a second; none: all at once
    requests: int  # of each run
    tuning_requests: int
    rounds: int  # turns of each case
    in_process: bool
    loaded: bool

    def traffic(self, rate: float | None, num_requests: int, seed: int) -> Traffic:
        """Return the requests of one run."""
        return make_traffic(self.model, rate, num_requests=num_requests, seed=seed)

    def traffics(self) -> list[Traffic]:
        """Return the traffics of one case's turn, one after another.

        Each rate has its own prompts: an engine that caches prefixes would find those of the rate before.
        """
        return [self.traffic(rate, self.requests, SEED + n) for n, rate in enumerate(self.rates or [None])]

    def tuning_traffic(self) -> Traffic:
        """Return the requests on which settings are tried: all at once, or at the middle rate."""
        rate = self.rates[len(self.rates) // 2] if self.rates else None
        return self.traffic(rate, self.tuning_requests, TUNING_SEED)

    def __str__(self) -> str:
        words = f"{self.model} {self.dtype}, {self.threads} threads, {'online' if self.rates else 'offline'}"
        words += ", in process" * self.in_process
        return words + ", a busy process on each core" * self.loaded


class Benchmark:
    """One run of the suite: its settings tried and kept, its runs, and why cases have none."""

    def __init__(self, context: BenchContext, plan: Plan, job: Job) -> None:
        self.plan = plan
        self.notes: dict[str, str] = {}  # by case: why it has no figures
        self.tried: dict[str, list[dict[str, Any]]] = {}
        self.chosen: dict[str, Settings] = {}
        self.runs: list[Run] = []
        self._console, self._is_quick, self._job = context.console, context.is_quick, job
        self._logs = context.output_dir / "orca-peers-logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def run(self, cases: Sequence[PeerCase], known: Mapping[str, Settings]) -> None:
        """Tune each case whose settings are not known, then let the cases take turns."""
        plan = self.plan
        with busy_processes(1 if plan.loaded else 0):
            for case in cases:
                if reason := case.missing(self._job):
                    self.notes[case.name] = reason
                elif best := known.get(case.name) or self._tune(case):
                    self.chosen[case.name] = best
                else:
                    self.notes[case.name] = "no settings gave comparable figures"
            ready = [case for case in cases if case.name in self.chosen]
            for turn in turns.rounds(ready, num_rounds=plan.rounds):
                for case in turn:
                    self._say(f"{case.name} ...")
                    self.runs += self._measure(case, self.chosen[case.name], plan.traffics())

    def section(self) -> Section:
        """Return table and data."""
        plan = self.plan
        body: list[str | Table] = [
            f"{plan}: {plan.requests} requests, prompts U(16,256), outputs U(1,64) tokens, medians of "
            f"{plan.rounds}. As ours: answers with the same text. Other load: the largest share that others took."
        ]
        if self.runs:
            body.append(table_of(rows_of(self.runs, ours=OURS)))
        body += [f"{name}: {_spelled(settings)}" for name, settings in self.chosen.items()]
        body += [f"{name}: {reason}" for name, reason in self.notes.items()]
        data = {
            "options": asdict(plan),
            "tried": self.tried,
            "settings": {name: dict(settings) for name, settings in self.chosen.items()},
            "notes": self.notes,
            "runs": [run.to_json() for run in self.runs],
        }
        has_problems = any(run.problems for run in self.runs)
        return Section("Orca against its peers", body, status="failed" if has_problems else "ok", data=data)

    def _tune(self, case: PeerCase) -> Settings | None:
        """Return the settings that are best on a short run; None: none gave figures that can be compared."""
        candidates = case.settings(self._job)[: QUICK_SETTINGS if self._is_quick else None]
        return best_of(candidates, lambda settings: self._score(case, settings))[0]

    def _score(self, case: PeerCase, settings: Settings) -> float:
        tried = self.tried.setdefault(case.name, [])
        try:
            (run,) = self._measure(case, settings, [self.plan.tuning_traffic()])
        except NotReadyError as error:
            tried.append({"settings": dict(settings), "error": str(error)})
            self._say(f"{case.name} {_spelled(settings)}: {error}")
            return 0.0
        tried.append({"settings": dict(settings), **run.to_json()})
        score = score_of(run, is_offline=not self.plan.rates)
        self._say(f"{case.name} {_spelled(settings)}: {run}")
        return score

    def _measure(self, case: PeerCase, settings: Settings, traffics: Sequence[Traffic]) -> list[Run]:
        """Start ``case``, warm it up, send it each of ``traffics``, end it."""
        runs = []
        log = self._logs / f"{case.name.replace(' ', '-')}.log"
        with running(case, self._job, settings, is_in_process=self.plan.in_process, log=log) as runner:
            runner.run(self.plan.traffic(None, 4, WARMUP_SEED))
            for traffic in traffics:
                with LoadMeter() as meter:
                    result = runner.run(traffic)
                problems = problems_of(result, [len(prompt) for prompt in traffic.prompts])
                runs.append(Run(case.name, traffic.name, result, meter.load.share_of_others, problems))
        return runs

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def run(
    context: BenchContext,
    *,
    model: str = "llama",
    dtype: str = "bf16",
    rates: tuple[float, ...] = (),
    requests: int = 0,
    rounds: int = 0,
    in_process: bool = False,
    loaded: bool = False,
    cases: tuple[str, ...] = (),
    settings_from: str = "",
    models: str = str(FOLDER),
    peers: str = str(PEERS),
) -> Section:
    """Tune each case, then let all take turns.

    Args:
        context: The suite's context; quick has fewer requests, one turn, and three settings for each case.
        model: ``llama`` or ``gpt2``.
        dtype: ``fp32``, or ``bf16``, which allows 16 bits.
        rates: Requests a second; none: all at once.
        requests: Of each run; 0: 24 when quick, else 96 at once and 200 at a rate.
        rounds: Turns of each case; 0: 1 when quick, else 3.
        in_process: Engines alone, without HTTP.
        loaded: One busy process on each core, at equal priority.
        cases: Names in :data:`CASES`; none: all.
        settings_from: An earlier result, whose settings are kept.
        models: Folder that ``mlsys_bench.orca.peers.models`` wrote.
        peers: Folder of the peers' environments.

    Raises:
        InvalidInputError: an option names what there is not; nothing has run.
    """
    by_name = {case.name: case for case in CASES}
    if unknown := [name for name in cases if name not in by_name]:
        raise InvalidInputError(f"no case is called {unknown[0]!r}: there are {', '.join(by_name)}")
    if model not in MODELS or dtype not in DTYPES:
        raise InvalidInputError("model is llama or gpt2, dtype is bf16 or fp32")
    job = Job(model, dtype, context.num_threads, Path(models).absolute(), Path(peers).absolute())
    if not job.directory.is_dir():
        raise InvalidInputError(f"{job.directory} is missing: python -m mlsys_bench.orca.peers.models writes it")
    known = json.loads(Path(settings_from).read_text())["results"]["settings"] if settings_from else {}
    plan = Plan(
        model=model,
        dtype=dtype,
        threads=context.num_threads,
        rates=tuple(map(float, rates)),
        requests=requests or (24 if context.is_quick else 200 if rates else 96),
        tuning_requests=12 if context.is_quick else 64,
        rounds=rounds or (1 if context.is_quick else 3),
        in_process=in_process,
        loaded=loaded,
    )
    benchmark = Benchmark(context, plan, job)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cases' processes end with this one
    try:
        benchmark.run([by_name[name] for name in cases or by_name], known)
    finally:
        signal.signal(signal.SIGTERM, before)
    return benchmark.section()


def _spelled(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


T = TypeVar("T")


def best_of(candidates: Iterable[T], score: Callable[[T], float]) -> tuple[T | None, list[tuple[T, float]]]:
    """Return the candidate with the largest score, the first of equals, and all scores; None if none is above 0.

    Example:
        >>> best_of([32, 64, 96], lambda size: min(size, 64) / 32)
        (64, [(32, 1.0), (64, 2.0), (96, 2.0)])
    """
    scores = [(candidate, score(candidate)) for candidate in candidates]
    best = max(scores, key=lambda pair: pair[1], default=None)
    return (best[0] if best is not None and best[1] > 0 else None), scores

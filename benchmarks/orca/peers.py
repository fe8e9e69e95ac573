"""Orca against its peers: each one's own server, driven by the same load generator with the same requests and weights.

    python benchmarks/orca/make_models.py .peers/models
    python benchmarks/orca/peers.py offline                         all requests at once: output tokens per second
    python benchmarks/orca/peers.py online --rates 1,2,3            Poisson arrivals: time to first token, ms per token
    python benchmarks/orca/peers.py offline --in-process --loaded   engines without HTTP, a busy process on each core
    python benchmarks/orca/peers.py offline --both-fronts           over HTTP and without, in turn: what HTTP costs

Peers are optional, each in an environment of its own (``benchmarks/peers/NAME/requirements.txt``); missing ones are
named.
Each contestant first tries its settings on a short run and keeps the best; then the contestants take turns, one running
at a time, and their answers are compared with ours. A peer without a server of its own (OpenVINO GenAI) stands behind a
small one of ours, ``engines/http_front.py``. ``foreign`` is the share of the machine that other processes took during a
run: figures of a row above a tenth tell little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants import CONTESTANTS, OURS, Contestant, Job, Settings
from findings import Run, best_settings, problems_of, score_of, table
from host import Shares, busy_processes
from mlsys_core import plot, report
from mlsys_core.environment import describe_environment
from rich.console import Console
from rich.table import Table as Printed
from runners import NotReadyError, Runner, running
from traffic import Traffic, make_traffic

ROOT = Path(__file__).parents[2]
NAMES = [contestant.name for contestant in CONTESTANTS]
WITHOUT_HTTP = ", without HTTP"
WARMUP_SEED, TUNING_SEED, SEED = 1, 2, 3


class Benchmark:
    """One invocation: its contestants, their work, and the results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.console = Console(width=None if os.isatty(1) else 160)
        self.job = Job(options.model, options.dtype, options.threads, options.models, options.peers)
        self.is_offline: bool = options.mode == "offline"
        self.notes: dict[str, str] = {}  # by contestant: why it has no figures
        self.tried: dict[str, list[dict[str, Any]]] = {}
        self.chosen: dict[str, Settings] = {}
        self.runs: list[Run] = []
        self.logs: Path = options.output / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def traffic(self, rate: float | None, num_requests: int, seed: int) -> Traffic:
        """Return the requests of one run."""
        return make_traffic(self.job.model, rate, num_requests=num_requests, seed=seed)

    def traffics(self) -> list[Traffic]:
        """Return the traffics of one contestant's turn, one after another.

        Each rate has its own prompts: an engine that caches prefixes would find those of the rate before.
        """
        rates = [None] if self.is_offline else self.options.rates
        return [self.traffic(rate, self.options.requests, SEED + number) for number, rate in enumerate(rates)]

    def contestants(self) -> list[Contestant]:
        """Return the requested contestants that can take part; note the others."""
        asked = [each for each in CONTESTANTS if not self.options.only or each.name in self.options.only]
        for contestant in asked:
            if reason := contestant.missing(self.job):
                self.note(contestant, reason)
        return [contestant for contestant in asked if contestant.name not in self.notes]

    def note(self, contestant: Contestant, reason: str) -> None:
        """Record and print the reason why ``contestant`` has no figures."""
        self.notes[contestant.name] = reason
        self.console.print(f"{contestant.name}: {reason}", markup=False)

    def measure(
        self, contestant: Contestant, settings: Settings, traffics: Sequence[Traffic], *, is_in_process: bool
    ) -> list[Run]:
        """Start ``contestant``, warm it up, send it each of ``traffics``, end it."""
        log = self.logs / f"{contestant.name.replace(' ', '-')}.log"
        name = contestant.name + WITHOUT_HTTP * (is_in_process and self.options.both_fronts)
        with running(contestant, self.job, settings, is_in_process=is_in_process, log=log) as runner:
            runner.run(self.traffic(None, 4, WARMUP_SEED))
            return [self.measured(name, runner, traffic) for traffic in traffics]

    def measured(self, name: str, runner: Runner, traffic: Traffic) -> Run:
        """Run once; measure other processes' share meanwhile."""
        with Shares() as shares:
            result = runner.run(traffic)
        problems = problems_of(result, [len(prompt) for prompt in traffic.prompts])
        return Run(name, traffic.name, result, shares.foreign, problems)

    def tune(self, contestant: Contestant) -> None:
        """Choose the settings of ``contestant`` on a short run of the mode's own kind."""
        rates = self.options.rates
        rate = None if self.is_offline else rates[len(rates) // 2]
        traffic = self.traffic(rate, self.options.tuning_requests, TUNING_SEED)
        scores: list[tuple[Settings, float]] = []
        for settings in contestant.settings(self.job)[: 3 if self.options.quick else None]:
            try:
                (run,) = self.measure(contestant, settings, [traffic], is_in_process=self.options.in_process)
            except NotReadyError as error:
                self.tried.setdefault(contestant.name, []).append({"settings": dict(settings), "error": str(error)})
                self.console.print(f"{contestant.name} {dict(settings)}: {error}", markup=False)
                continue
            score = score_of(run, is_offline=self.is_offline)
            scores.append((settings, score))
            self.tried.setdefault(contestant.name, []).append({"settings": dict(settings), **run.to_json()})
            latency = run.result.normalized_latency
            self.console.print(
                f"{contestant.name} {_spelled(settings)}: {run.result.throughput_tokens_per_s:.1f} tokens/s, "
                f"{latency.p50 * 1e3 if latency else 0:.0f} ms/token, foreign {run.foreign:.0%} "
                f"{'; '.join(run.problems)}",
                markup=False,
                highlight=False,
            )
        best = best_settings(scores)
        if best is None:
            self.note(contestant, "no settings gave comparable figures")
        else:
            self.chosen[contestant.name] = best

    def run(self) -> None:
        """Tune, then let the contestants take turns."""
        options = self.options
        contestants = self.contestants()
        with busy_processes(options.loaded):
            for contestant in contestants:
                if contestant.name in options.settings_from:
                    self.chosen[contestant.name] = options.settings_from[contestant.name]
                else:
                    self.tune(contestant)
            traffics = self.traffics()
            fronts = [False, True] if options.both_fronts else [options.in_process]
            for repetition in range(options.repetitions):
                for contestant, is_in_process in itertools.product(contestants, fronts):
                    if contestant.name in self.chosen:
                        self.console.print(f"{contestant.name}, repetition {repetition + 1}", highlight=False)
                        settings = self.chosen[contestant.name]
                        self.runs += self.measure(contestant, settings, traffics, is_in_process=is_in_process)

    def section(self) -> report.Section:
        """Return tables, figure and data."""
        options = self.options
        what = f"{options.model} {options.dtype}, {options.threads} threads, {options.mode}"
        what += ", in process" * options.in_process + ", with HTTP and without" * options.both_fronts
        what += ", a busy process on each core" * options.loaded
        body: list[str | report.Table | report.Figure] = [
            f"{what}: {options.requests} requests, prompts U(16,256), outputs U(1,64) tokens, medians of "
            f"{options.repetitions}. Foreign: the largest share of the machine that other processes took."
        ]
        if self.runs:
            body.append(table(self.runs, ours=OURS, caption=what))
            body.append(report.Figure(self._figure(what), caption=what))
        body += [f"{name}: {_spelled(settings)}" for name, settings in self.chosen.items()]
        body += [f"{name}: {reason}" for name, reason in self.notes.items()]
        has_problems = any(run.problems for run in self.runs)
        data = {
            "options": {key: value for key, value in vars(options).items() if not isinstance(value, Path)},
            "tried": self.tried,
            "settings": {name: dict(settings) for name, settings in self.chosen.items()},
            "notes": self.notes,
            "runs": [run.to_json() for run in self.runs],
        }
        return report.Section("Orca against its peers", body, status="failed" if has_problems else "ok", data=data)

    def _figure(self, title: str) -> str:
        good = [run for run in self.runs if not run.problems]
        if self.is_offline:
            groups = {"output tokens/s": {run.contestant: run.result.throughput_tokens_per_s for run in good}}
            return plot.to_svg(plot.bars(groups, ylabel="output tokens/s", title=title))
        points: dict[str, list[Any]] = {}
        for run in good:
            points.setdefault(run.contestant, []).append(run.result.point())
        return plot.to_svg(plot.throughput_latency(points, title=title))


def _spelled(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _settings_from(path: str) -> dict[str, Settings]:
    settings: dict[str, Settings] = json.loads(Path(path).read_text())["results"]["settings"]
    return settings


def _names(text: str) -> list[str]:
    """Return the contestants named, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no contestant {unknown[0]!r}: there are {', '.join(NAMES)}")
    return names


def parse() -> argparse.Namespace:
    """Parse the command line; ``--quick`` lowers the numbers that were not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("offline", "online"))
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="bf16: 16 bits are allowed")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant")
    parser.add_argument("--rates", type=_rates, default=[1.9, 4.6, 6.9], help="requests per second, online")
    parser.add_argument("--requests", type=int, help="in a run; by default 96 offline, 200 online, 24 quick")
    parser.add_argument("--repetitions", type=int, help="turns of each contestant; by default 3, 1 quick")
    fronts = parser.add_mutually_exclusive_group()
    fronts.add_argument("--in-process", action="store_true", help="engines alone, without HTTP")
    fronts.add_argument("--both-fronts", action="store_true", help="each over HTTP and without it, in turn")
    parser.add_argument("--loaded", action="store_true", help="one busy process on each core, at equal priority")
    parser.add_argument("--quick", action="store_true", help="fewer requests, one repetition, three settings each")
    parser.add_argument("--only", type=_names, help=f"these contestants, by comma, of {', '.join(NAMES)}")
    parser.add_argument("--settings-from", type=_settings_from, default={}, help="an earlier result: do not tune anew")
    parser.add_argument("--models", type=Path, default=ROOT / ".peers" / "models", help="what make_models.py wrote")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of the peers' environments")
    parser.add_argument("--output", type=Path, default=ROOT / "report" / "orca-peers", help="folder to write to")
    options = parser.parse_args()
    options.tuning_requests = 12 if options.quick else 64
    options.requests = options.requests or (24 if options.quick else 96 if options.mode == "offline" else 200)
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    return options


def main() -> int:
    """Measure, print, write JSON and page; return 1 if a contestant's figures cannot be compared."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contestants are ended when this is
    benchmark = Benchmark(options)
    benchmark.run()
    section = benchmark.section()
    for item in section.body:
        if isinstance(item, report.Table):
            printed = Printed(*item.columns, title=item.caption)
            for row in item.rows:
                printed.add_row(*row)
            benchmark.console.print(printed)
        elif isinstance(item, str):
            benchmark.console.print(item, markup=False, highlight=False)
    parts = ["orca-peers", options.mode, options.model, options.dtype]
    parts += ["in-process"] * options.in_process + ["both-fronts"] * options.both_fronts + ["loaded"] * options.loaded
    name = "-".join(parts)
    environment = describe_environment()
    record = {"environment": environment, "results": dict(section.data)}
    (options.output / f"{name}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    page = report.write(options.output / f"{name}.html", name, [section], environment)
    benchmark.console.print(f"written: {page} and .json")
    return int(section.status == "failed")


if __name__ == "__main__":
    raise SystemExit(main())

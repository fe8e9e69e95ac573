"""The suite ``mlsys bench nimble``: a process for each net, in which all contestants take turns, then one report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlsys_core
from mlsys_core.config import settings
from mlsys_core.device import device_kind
from mlsys_core.errors import InvalidInputError, MlsysError

import mlsys_nimble
from mlsys_nimble.bench.race import Outcome
from mlsys_nimble.bench.summary import report

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

NETS = (
    "six-branch",
    "mlp",
    "gru",
    "resnet20-cifar",
    "darts",
    "nasnet-mobile",
    "mobilenet-v2",
    "efficientnet-b0",
    "inception-v3",
    "resnet50",
    "minilm-l6",
    "bert-base",
)
QUICK_NETS = ("six-branch", "mlp", "gru", "resnet20-cifar", "mobilenet-v2")
SECONDS, QUICK_SECONDS = 60.0, 8.0  # of turns for each net
PEERS = Path(".peers/nimble")  # where benchmarks/peers/nimble/requirements.txt says to install them


def run(context: BenchContext) -> Section:
    """The nets of chapter 3, with the peers of ``.peers/nimble`` if they are there, else those that we can import.

    On a CUDA device: the nets of figures 3.8 and 3.9 and table 3.1, with what torch itself has.
    """
    if device_kind(context.device).name != "cpu":
        from mlsys_nimble.bench.gpu import run_on_gpu

        return run_on_gpu(context)
    return run_nets(context)


def run_nets(
    context: BenchContext, *, nets: Sequence[str] = (), peers: Path | None = None, trust_code: bool = False
) -> Section:
    """Race on each net and report.

    Args:
        context: Console, quick or not, threads. Another device than ``cpu`` is refused.
        nets: What :func:`mlsys_nimble.nets.resolve.load_model` takes; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: An environment's folder or its Python; None: :data:`PEERS` if it is there, else this interpreter.
        trust_code: Let ``.pt2`` files run code that they hold.

    Raises:
        InvalidInputError: the device is another, ``peers`` has no Python, or a net is not there; nothing has run.
        MlsysError: a race ended without outcomes; the message is its last words.
    """
    if device_kind(context.device).name != "cpu":
        raise InvalidInputError(f"nimble's benchmark runs on cpu, not on {context.device!r}: leave out --device")
    from mlsys_nimble.nets.resolve import check_model

    for name in nets:
        check_model(name)
    python = interpreter(peers)
    outcomes: dict[str, dict[str, Outcome]] = {}
    console = context.console
    with console.status("") as status:
        for name in nets or (QUICK_NETS if context.is_quick else NETS):
            if not console.is_terminal:  # where no status line is shown
                console.print(f"{name} ...")
            outcomes[name] = race_in_child(
                name,
                python=python,
                num_threads=context.num_threads,
                seconds=QUICK_SECONDS if context.is_quick else SECONDS,
                is_quick=context.is_quick,
                say=status.update,
                trust_code=trust_code,
            )
    return report(outcomes, num_threads=context.num_threads)


def interpreter(peers: Path | None) -> Path:
    """The Python that races are run with.

    Raises:
        InvalidInputError: there is none in ``peers``.
    """
    folder = peers or PEERS
    candidates = [folder] if folder.is_file() else [folder / "bin" / "python", folder / "Scripts" / "python.exe"]
    for candidate in candidates:
        if candidate.exists():
            return candidate.absolute()  # not resolved: a link's target is another environment
    if peers is not None:
        raise InvalidInputError(
            f"{peers} is no environment with a Python; benchmarks/peers/nimble/requirements.txt says how to make one"
        )
    return Path(sys.executable)


def race_in_child(
    model: str,
    *,
    python: Path,
    num_threads: int,
    seconds: float,
    is_quick: bool,
    say: Callable[[str], None],
    trust_code: bool = False,
) -> dict[str, Outcome]:
    """The outcomes of one net's race."""
    command = [str(python), "-m", "mlsys_nimble.bench.child", model, "--threads", str(num_threads)]
    command += ["--seconds", str(seconds), "--cache-dir", str(settings().cache_dir), *(["--quick"] if is_quick else [])]
    command += ["--trust-code"] if trust_code else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(num_threads)
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        lines: list[str] = []
        try:
            for line in child.stdout:
                lines.append(line.strip())
                if not line.startswith("{"):
                    say(line.strip())
            errors = child.stderr.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0 or not lines or not lines[-1].startswith("{"):
        last = " ".join(errors.strip().splitlines()[-1:]) or f"exit status {child.returncode}"
        raise MlsysError(f"the race on {model} ended without outcomes: {last}")
    return {name: Outcome(**_as_tuple(fields)) for name, fields in json.loads(lines[-1]).items()}


def _as_tuple(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "samples_s": tuple(fields["samples_s"])}


def _environment(num_threads: int) -> dict[str, str]:
    """Ours, with this package on the path of whatever interpreter, and OpenMP's own policy of waiting.

    The command line asks OpenMP's threads to sleep at once, which a server on a shared host wants. Contestants wait as
    they do by default: that is faster for small operators, and between turns there is time to stop.
    """
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    roots = [str(Path(str(package.__file__)).parents[1]) for package in (mlsys_core, mlsys_nimble)]
    environment["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(roots), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment["OMP_NUM_THREADS"] = str(num_threads)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(settings().cache_dir / "nimble" / "bench" / "inductor")
    return environment

"""Races of several nets, each in a process of its own and kept when it is done, so that a run that was cut goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.config import settings
from mlsys_core.environment import describe_environment
from mlsys_core.errors import MlsysError
from mlsys_nimble.nets.blocks import Net, settle
from torch.utils._pytree import tree_leaves

from mlsys_bench.harness.child import interpreter, run_in_child
from mlsys_bench.harness.journal import Journal
from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.nimble.cases import Subject, build_kernels
from mlsys_bench.nimble.papers import check_model, load_model
from mlsys_bench.nimble.zoo_nets import let_torchvision_load

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

PEERS_AT = Path(".peers/nimble")  # where benchmarks/peers/nimble/requirements.txt says to install them


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """Settings that the races of a run share."""

    nets: tuple[str, ...]
    python: Path  # interpreter with the peers
    env: dict[str, str]  # of a race's process
    common: dict[str, Any]  # arguments of every race: those of :func:`subject_of`, and is_quick


def race_settings(context: BenchContext, nets: tuple[str, ...], peers: str | None, trust_code: bool) -> RaceSettings:
    """Check the nets' names and find the peers.

    Raises:
        InvalidInputError: ``peers`` has no Python, or a net is not there.
    """
    for name in nets:
        check_model(name)
    cache_dir = settings().cache_dir / "nimble" / "bench"
    common = {
        "num_threads": context.num_threads,
        "is_quick": context.is_quick,
        "cache_dir": str(cache_dir),
        "trust_code": trust_code,
    }
    env = {"OMP_NUM_THREADS": str(context.num_threads), "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor")}
    return RaceSettings(nets, interpreter(peers, PEERS_AT), env, common)


def race_each(
    context: BenchContext, suite: str, function: str, given: RaceSettings, *, budget_s: float
) -> Iterator[tuple[str, dict[str, Any] | MlsysError]]:
    """Yield each net with its record (``load`` and ``found``), or with the error that ended its race.

    Each net that is done is a line of the journal ``SUITE.jsonl`` in the context's folder, until all are done. A run
    that was cut goes on with the nets that the journal lacks; one whose race failed is tried again.

    Args:
        context: The suite's context.
        suite: The suite's name.
        function: ``module:function`` that races on one net.
        given: The nets and the arguments that every race has.
        budget_s: Seconds of turns, an argument of every race.

    Raises:
        InvalidInputError: the journal is of another commit, number of threads or time; nothing has run.
    """
    commit = describe_environment().get("commit")
    setting = {"num_threads": context.num_threads, "budget_s": budget_s, "commit": commit}
    journal = Journal(context.output_dir / f"{suite}.jsonl", setting, key="net")
    with context.console.status("") as status:
        for number, name in enumerate(given.nets, 1):
            if name not in journal.finished:
                step = f"{number} of {len(given.nets)}: {name.rpartition(':')[2]}"
                if not context.console.is_terminal:  # where no status line is shown
                    context.console.print(f"{step} ...")
                try:
                    with LoadMeter() as meter:
                        found = run_in_child(
                            function,
                            {"model": name, "budget_s": budget_s, **given.common},
                            python=given.python,
                            env=given.env,
                            say=lambda text, step=step: status.update(f"{step}: {text}"),  # type: ignore[misc]
                        )
                except MlsysError as error:
                    yield name, error
                    continue
                journal.add({"net": name, "load": str(meter.load), "found": found})
            yield name, journal.finished[name]
    if set(given.nets) <= journal.finished.keys():
        journal.path.unlink(missing_ok=True)


def subject_of(model: str, num_threads: int, cache_dir: str, trust_code: bool) -> Subject:
    """Load a net, set up this process for its race, and compile Nimble's kernels."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    let_torchvision_load()
    net = load_model(model, trust_code=trust_code)
    if model.startswith(("timm:", "torchvision:")):
        with suppress(ValueError):  # a batch norm of one row measures nothing: its statistics stay as they are
            net = settle(net)
        net.module.eval()
    folder = Path(cache_dir) / f"{_as_file_name(model)}-{_fingerprint(net.module)}"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{model}: Nimble's kernels, compiled on first use", flush=True)
    with suppress(Exception):  # whatever it is, Nimble's own turn tells it
        build_kernels()
    return Subject(net, num_threads, folder)


def exact_results(net: Net) -> list[torch.Tensor]:
    """Return the results of the net computed in float64."""
    inputs = (x.double() if x.is_floating_point() else x for x in net.inputs)
    results = copy.deepcopy(net.module).eval().double()(*inputs)
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def relative_difference(results: Sequence[Any], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference over the largest value of each result; infinite where the form differs."""
    if len(results) != len(expected):
        return float("inf")
    largest = 0.0
    for result, wanted in zip(results, expected, strict=True):
        got = torch.as_tensor(result)
        if got.shape != wanted.shape:
            return float("inf")
        if wanted.numel():
            off = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-12)
            largest = max(largest, float("inf") if off.isnan() else float(off))
    return largest


def _fingerprint(module: torch.nn.Module) -> str:
    """Return a digest of weights and text: what is exported from another net is not taken for this one's."""
    digest = sha256(str(module).encode())
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _as_file_name(model: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in model)

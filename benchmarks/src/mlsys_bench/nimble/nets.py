"""The suite ``nimble``: nets of chapter 3, each raced in a process of its own, with a peers' interpreter or ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.device import device_kind
from mlsys_core.errors import InvalidInputError

from mlsys_bench.harness.child import interpreter, run_in_child
from mlsys_bench.harness.race import Case, Outcome, race
from mlsys_bench.nimble.summary import EAGER_TIMES, OURS, TOLERANCE, report

if TYPE_CHECKING:
    import torch
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section
    from mlsys_nimble.nets.blocks import Net

    from mlsys_bench.nimble.cases import Maker, Subject

NETS = (
    *("six-branch", "mlp", "gru", "resnet20-cifar", "darts", "nasnet-mobile", "mobilenet-v2"),
    *("efficientnet-b0", "inception-v3", "resnet50", "minilm-l6", "bert-base"),
)
QUICK_NETS = ("six-branch", "mlp", "gru", "resnet20-cifar", "mobilenet-v2")
SECONDS, QUICK_SECONDS = 60.0, 8.0  # of turns for each net
PEERS = Path(".peers/nimble")  # where benchmarks/peers/nimble/requirements.txt says to install them


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net and report.

    On a CUDA device: the nets of figures 3.8 and 3.9 and table 3.1, with what torch itself has.

    Args:
        context: The suite's context.
        nets: Nets as :func:`mlsys_bench.nimble.papers.load_model` takes them; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: An environment's folder or its Python; None: :data:`PEERS` if it is there, else this interpreter.
        trust_code: Let ``.pt2`` files run code that they hold.

    Raises:
        InvalidInputError: ``peers`` has no Python, or a net is not there; nothing has run.
        MlsysError: a race ended without outcomes; the message is its last words.
    """
    if device_kind(context.device).name != "cpu":
        from mlsys_bench.nimble.gpu import run_on_gpu

        if peers is not None:
            raise InvalidInputError(f"on {context.device} the peers are torch's own: leave out --peers")
        return run_on_gpu(context, nets)
    settings = race_settings(context, nets or (QUICK_NETS if context.is_quick else NETS), peers, trust_code)
    races: dict[str, dict[str, Outcome]] = {}
    console = context.console
    with console.status("") as status:
        for name in settings.nets:
            if not console.is_terminal:  # where no status line is shown
                console.print(f"{name} ...")
            arguments = settings.arguments(name) | {"budget_s": QUICK_SECONDS if context.is_quick else SECONDS}
            found = run_in_child(
                "mlsys_bench.nimble.nets:race_net",
                arguments,
                python=settings.python,
                env=settings.env,
                say=status.update,
            )
            races[name] = {case: Outcome(**fields) for case, fields in found.items()}
    return report(races, num_threads=context.num_threads)


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """Settings that the races of a run share."""

    nets: tuple[str, ...]
    python: Path  # interpreter with the peers
    env: dict[str, str]  # of a race's process
    common: dict[str, Any]  # arguments of every race

    def arguments(self, net: str) -> dict[str, Any]:
        """Return the arguments of a net's race, but for its budget."""
        return {"model": net, **self.common}


def race_settings(context: BenchContext, nets: tuple[str, ...], peers: str | None, trust_code: bool) -> RaceSettings:
    """Check the nets' names and find the peers.

    Raises:
        InvalidInputError: ``peers`` has no Python, or a net is not there.
    """
    from mlsys_core.config import settings

    from mlsys_bench.nimble.papers import check_model

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
    return RaceSettings(nets, interpreter(peers, PEERS), env, common)


def race_net(
    model: str, num_threads: int, budget_s: float, is_quick: bool, cache_dir: str, trust_code: bool
) -> dict[str, dict[str, Any]]:
    """Race all cases on one net in this process; return the fields of the outcomes by case."""
    import torch

    net, makers = makers_of(model, num_threads, is_quick, cache_dir, trust_code)
    with torch.no_grad():
        outcomes = race(
            makers,
            difference=relative_difference,
            expected=exact_results(net),
            tolerance=TOLERANCE,
            slack=EAGER_TIMES,  # some nets make more of rounding than others
            turn_s=0.1,
            budget_s=budget_s,
            say=lambda step: print(f"{model}: {step}", flush=True),
        )
    return {name: asdict(outcome) for name, outcome in outcomes.items()}


def makers_of(
    model: str,
    num_threads: int,
    is_quick: bool,
    cache_dir: str,
    trust_code: bool,
    num_callers: int = 1,
    makers: Mapping[str, Maker] | None = None,
) -> tuple[Net, dict[str, Callable[[], Case]]]:
    """Load a net and set up this process for its race; return it and the makers of all cases by name.

    ``num_callers`` threads may call Nimble at once; peers need not be told. ``makers`` None: all of
    :data:`mlsys_bench.nimble.cases.MAKERS`.
    """
    from mlsys_bench.nimble.cases import MAKERS, SLOW_TO_PREPARE, left_out_of_quick, nimble

    subject = subject_of(model, num_threads, cache_dir, trust_code)
    chosen = dict(makers or MAKERS) | {OURS: nimble(use_multi_stream=True, num_callers=num_callers)}
    return subject.net, {
        name: partial(left_out_of_quick if is_quick and name in SLOW_TO_PREPARE else make, subject)
        for name, make in chosen.items()
    }


def subject_of(model: str, num_threads: int, cache_dir: str, trust_code: bool) -> Subject:
    """Load a net, set up this process for its race, and compile Nimble's kernels."""
    import torch
    from mlsys_nimble.nets.blocks import settle

    from mlsys_bench.nimble.cases import Subject, build_kernels
    from mlsys_bench.nimble.papers import load_model
    from mlsys_bench.nimble.zoo_nets import let_torchvision_load

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
    import torch
    from torch.utils._pytree import tree_leaves

    inputs = (x.double() if x.is_floating_point() else x for x in net.inputs)
    results = copy.deepcopy(net.module).eval().double()(*inputs)
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def relative_difference(results: Sequence[Any], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference over the largest value of each result; infinite where the form differs."""
    import torch

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

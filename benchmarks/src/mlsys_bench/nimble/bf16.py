"""The suite ``nimble-bf16``: nets in bf16 beside torch's, OpenVINO's and ONNX Runtime's, errors beside speed."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from mlsys_nimble.nets.blocks import Net
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from mlsys_bench.harness.race import Case, Outcome, Outcomes, admit, timed
from mlsys_bench.nimble import runtimes
from mlsys_bench.nimble.accuracy import (
    AUTOCAST,
    BF16,
    COMPILED,
    FLOAT,
    PAIRS,
    TORCH,
    WEIGHTS,
    Forms,
    distance,
    errors,
    report_of,
)
from mlsys_bench.nimble.cases import Subject, exported, in_channels_last, is_image, onnx_file
from mlsys_bench.nimble.int8_cases import Function
from mlsys_bench.nimble.summary import OURS

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

    from mlsys_bench.nimble.cases import Subject


NAME = "nimble-bf16"
NETS = ("mobilenet-v2", "resnet50", "minilm-l6", "bert-base", "timm:vit_base_patch16_224")
QUICK_NETS = ("mobilenet-v2", "minilm-l6")
FORMS = Forms(
    "in bf16",
    (f"{OURS}, {PAIRS}", f"{OURS}, {WEIGHTS}"),
    (
        *(f"{peer}, {form}" for peer in (TORCH, COMPILED) for form in (BF16, AUTOCAST)),
        f"ONNX Runtime, {BF16}",
        f"OpenVINO, {BF16}",
    ),
    "eager float32",
)
FLOATS = tuple(f"{name}, {FLOAT}" for name in (TORCH, "ONNX Runtime", "OpenVINO", OURS))
SECONDS, QUICK_SECONDS = 40.0, 8.0  # of turns for each net
NUM_HELD_OUT = 16  # inputs; a quarter in quick runs
FLOAT_TOLERANCE, TOLERANCE = 1e-3, 0.5  # root mean square from float64's results over theirs; bf16: no other net


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net in bf16, beside the float32 of all but the compiler.

    A run that was cut goes on, as the suite ``nimble-zoo``'s does, from ``nimble-bf16.jsonl``.

    Args:
        context: The suite's context; quick: without torch.compile.
        nets: As for the suite ``nimble``; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: As for the suite ``nimble``.
        trust_code: Let ``.pt2`` files run code that they hold.

    Raises:
        InvalidInputError: ``peers`` has no Python, a net is not there, or the journal is of another setting.
    """
    from mlsys_bench.nimble.nets import race_settings
    from mlsys_bench.nimble.one_by_one import race_with_accuracy

    settings = race_settings(context, nets or (QUICK_NETS if context.is_quick else NETS), peers, trust_code)
    budget_s = QUICK_SECONDS if context.is_quick else SECONDS
    function = "mlsys_bench.nimble.bf16:race_net"
    return race_with_accuracy(context, NAME, function, settings, budget_s=budget_s, ours=FORMS.ours[0], report=report)


def race_net(
    model: str, num_threads: int, budget_s: float, is_quick: bool, cache_dir: str, trust_code: bool
) -> dict[str, dict[str, Any]]:
    """Race on one net in this process; return by case the fields of the outcomes and the errors."""
    import torch
    from mlsys_core.profiling.turns import take_turns
    from torch.utils._pytree import tree_leaves

    from mlsys_bench.nimble.int8_cases import drawn
    from mlsys_bench.nimble.nets import exact_results, subject_of

    subject = subject_of(model, num_threads, cache_dir, trust_code)
    held_out = drawn(subject.net, NUM_HELD_OUT // (4 if is_quick else 1), seed=2)
    functions: dict[str, Function] = {}
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Case] = {}
    with torch.no_grad():
        expected = exact_results(subject.net)
        for tolerance, names in ((FLOAT_TOLERANCE, FLOATS), (TOLERANCE, (*FORMS.peers, *FORMS.ours))):
            found, own = admit(
                {name: _maker(name, subject, functions, is_quick) for name in names},
                difference=distance,
                expected=expected,
                tolerance=tolerance,
                say=lambda step: print(f"{model}: {step}", flush=True),
            )
            outcomes, ready = outcomes | found, ready | own
        print(f"{model}: errors over {len(held_out)} inputs", flush=True)
        wanted = [tree_leaves(subject.net.module(*inputs)) for inputs in held_out]
        accuracy = {
            name: errors([(functions[name](*inputs), one) for inputs, one in zip(held_out, wanted, strict=True)])
            for name in ready
            if name not in FLOATS
        }
        print(f"{model}: {len(ready)} cases in turns", flush=True)
        turns = take_turns({name: case.call for name, case in ready.items()}, turn_s=0.1, budget_s=budget_s)
    outcomes |= {name: timed(outcomes[name], own_turns) for name, own_turns in turns.items()}
    return {"outcomes": {name: asdict(one) for name, one in outcomes.items()}, "accuracy": accuracy}


def _maker(name: str, subject: Subject, functions: dict[str, Function], is_quick: bool) -> Callable[[], Case]:
    """Return the maker of a case, which keeps its function of inputs as well."""

    def make() -> Case:
        from mlsys_bench.nimble.cases import left_out_of_quick

        if is_quick and name.startswith(COMPILED):
            return left_out_of_quick(subject)
        function = functions[name] = function_of(name, subject)
        return Case(lambda: function(*subject.net.inputs), list)

    return make


def report(
    races: Mapping[str, Outcomes], accuracy: Mapping[str, Mapping[str, Any]], num_threads: int, loads: Mapping[str, str]
) -> Section:
    """Return the races with the losses first, each case's errors, and all figures as data."""
    return report_of(FORMS, races, accuracy, num_threads, loads)


class Halves(nn.Module):
    """A module whose parameters are bf16, between float32 inputs and results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).bfloat16()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module on rounded inputs; whole numbers stay."""
        return _as(torch.float32, self.module(*_as(torch.bfloat16, inputs)))


class Autocast(nn.Module):
    """A float32 module under autocast to bf16, with float32 results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module; torch keeps the weights' rounded copies only within the call."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self.module(*inputs)
        return _as(torch.float32, found)


def _as(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def function_of(name: str, subject: Subject) -> Function:
    """Make the form of this name ready.

    Raises:
        Exception: whatever its library raises.
    """
    contestant, form = name.split(", ")
    if contestant == OURS:
        return _nimble(subject, {FLOAT: "fp32", WEIGHTS: "bf16", PAIRS: "bf16-pairs"}[form])
    if contestant == "ONNX Runtime":
        if form == FLOAT:
            return runtimes.onnx_runtime(onnx_file(subject), subject.num_threads)
        halves = Net(Halves(subject.net.module), subject.net.inputs)
        path = exported(halves, subject.cache_dir / f"bf16-{torch.__version__}.onnx")
        return runtimes.onnx_runtime(path, subject.num_threads)
    if contestant == "OpenVINO":
        model = importlib.import_module("openvino").Core().read_model(str(onnx_file(subject)))
        return runtimes.openvino(model, subject.num_threads, "f32" if form == FLOAT else "bf16")
    return _torch(contestant, form, subject)


def _nimble(subject: Subject, precision: str) -> Function:
    from mlsys_nimble.module import Nimble

    net = subject.net
    model = Nimble(net.module).prepare(net.inputs, num_threads=subject.num_threads, precision=precision)
    return lambda *inputs: tree_leaves(model(*inputs))


def _torch(contestant: str, form: str, subject: Subject) -> Function:
    """Return eager's or the compiler's form; images channels last."""
    assert contestant in (TORCH, COMPILED)
    net = in_channels_last(subject) if is_image(subject.net) else subject.net
    module: Any = {FLOAT: lambda given: given, BF16: Halves, AUTOCAST: Autocast}[form](net.module)
    if contestant == COMPILED:
        module = torch.compile(copy.deepcopy(module), options={"freezing": True})
    layout: dict[str, Any] = {"memory_format": torch.channels_last}
    return lambda *inputs: tree_leaves(module(*(x.to(**layout) if x.dim() == 4 else x for x in inputs)))

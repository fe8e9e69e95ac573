"""The suite ``nimble-int8``: quantised nets beside ONNX Runtime's and OpenVINO's, accuracy beside speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlsys_bench.harness.race import Case, Outcome, Outcomes, admit, timed
from mlsys_bench.nimble.accuracy import FLOAT, Forms, distance, errors, report_of
from mlsys_bench.nimble.summary import OURS

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section
    from torch import nn

    from mlsys_bench.nimble.cases import Subject
    from mlsys_bench.nimble.int8_cases import Function, Inputs

NAME = "nimble-int8"
NETS = ("mobilenet-v2", "resnet50", "minilm-l6", "bert-base")
QUICK_NETS = ("mobilenet-v2", "minilm-l6")
CONTESTANTS = (OURS, "ONNX Runtime", "OpenVINO")
STATIC, DYNAMIC = "static", "dynamic"
OUR_FORMS = (f"{OURS}, {STATIC}", f"{OURS}, {DYNAMIC}")
FORMS = Forms(
    "in int8",
    OUR_FORMS,
    tuple(f"{peer}, {form}" for peer in CONTESTANTS[1:] for form in (STATIC, DYNAMIC)),
    "each one's own float32",
)
SECONDS, QUICK_SECONDS = 40.0, 8.0  # of turns for each net
NUM_CALIBRATION, NUM_HELD_OUT = 8, 16  # inputs; a quarter in quick runs
FLOAT_TOLERANCE, TOLERANCE = 1e-3, 0.5  # root mean square from float64's results over theirs; int8: no other net
EAGER_TOLERANCE = 0.02  # Nimble's int8 from eager PyTorch's on the same graph, or thrice what moving it by 1e-6 does


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net in int8: static quantisation, and dynamic as well for nets whose inputs are whole numbers.

    A run that was cut goes on, as the suite ``nimble-zoo``'s does, from ``nimble-int8.jsonl``.

    Args:
        context: The suite's context.
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
    function = "mlsys_bench.nimble.int8:race_net"
    return race_with_accuracy(context, NAME, function, settings, budget_s=budget_s, ours=OUR_FORMS[0], report=report)


def race_net(
    model: str, num_threads: int, budget_s: float, is_quick: bool, cache_dir: str, trust_code: bool
) -> dict[str, dict[str, Any]]:
    """Race on one net in this process; return by case the fields of the outcomes and the accuracy."""
    import torch
    from mlsys_core.profiling.turns import take_turns

    from mlsys_bench.nimble.int8_cases import drawn
    from mlsys_bench.nimble.nets import exact_results, subject_of

    subject = subject_of(model, num_threads, cache_dir, trust_code)
    share = 4 if is_quick else 1
    calibration = [subject.net.inputs, *drawn(subject.net, NUM_CALIBRATION // share - 1, seed=1)]
    held_out = drawn(subject.net, NUM_HELD_OUT // share, seed=2)
    forms = _Forms(subject, calibration)
    with torch.no_grad():
        expected = exact_results(subject.net)
        outcomes: dict[str, Outcome] = {}
        ready: dict[str, Case] = {}
        for tolerance, is_float in ((FLOAT_TOLERANCE, True), (TOLERANCE, False)):
            makers = {name: forms.maker(name) for name in forms.names if name.endswith(FLOAT) == is_float}
            found, own = admit(
                makers,
                difference=distance,
                expected=expected,
                tolerance=tolerance,
                say=lambda step: print(f"{model}: {step}", flush=True),
            )
            outcomes, ready = outcomes | found, ready | own
        print(f"{model}: accuracy over {len(held_out)} inputs", flush=True)
        accuracy = forms.accuracy([name for name in ready if not name.endswith(FLOAT)], held_out)
        print(f"{model}: {len(ready)} cases in turns", flush=True)
        turns = take_turns({name: case.call for name, case in ready.items()}, turn_s=0.1, budget_s=budget_s)
    for name, own_turns in turns.items():
        outcomes[name] = timed(outcomes[name], own_turns)
        if is_off(accuracy.get(name, {})):
            outcomes[name] = Outcome("differs", f"from eager's int8 by {accuracy[name]['from_eager']:.1e}")
    return {"outcomes": {name: asdict(one) for name, one in outcomes.items()}, "accuracy": accuracy}


class _Forms:
    """Forms of one net by name, each a function that is made when its case is."""

    def __init__(self, subject: Subject, calibration: Sequence[Inputs]) -> None:
        from mlsys_bench.nimble.int8_cases import is_text

        self._subject, self._calibration = subject, calibration
        kinds = (STATIC, DYNAMIC) if is_text(subject.net) else (STATIC,)
        peers = [f"ONNX Runtime, {kind}" for kind in kinds] + [f"OpenVINO, {STATIC}"]
        self.names = [*(f"{name}, {FLOAT}" for name in CONTESTANTS), *(f"{OURS}, {kind}" for kind in kinds), *peers]
        self._made: dict[str, Function] = {}
        self._eager: dict[str, nn.Module] = {}  # PT2E's graphs, by our forms

    def maker(self, name: str) -> Callable[[], Case]:
        """Return the maker of a form's case."""

        def make() -> Case:
            function = self._made[name] = self._make(name)
            return Case(lambda: function(*self._subject.net.inputs), list)

        return make

    def _make(self, name: str) -> Function:
        from mlsys_bench.nimble import int8_cases, runtimes
        from mlsys_bench.nimble.cases import onnx_file

        subject, calibration = self._subject, self._calibration
        match name.split(", "):
            case [contestant, kind] if contestant == OURS and kind == FLOAT:
                return int8_cases.nimble(subject.net.module, subject)
            case [contestant, kind] if contestant == OURS:
                graph = int8_cases.by_pt2e(subject.net, calibration, is_dynamic=kind == DYNAMIC)
                self._eager[name] = graph
                return int8_cases.nimble(graph, subject)
            case ["ONNX Runtime", kind] if kind == FLOAT:
                return runtimes.onnx_runtime(onnx_file(subject), subject.num_threads)
            case ["ONNX Runtime", kind]:
                quantise = int8_cases.onnx_dynamic if kind == DYNAMIC else int8_cases.onnx_static
                return quantise(subject, calibration)
            case [_, kind] if kind == FLOAT:
                return int8_cases.openvino(subject)
            case _:
                return int8_cases.openvino_static(subject, calibration)

    def accuracy(self, names: Sequence[str], held_out: Sequence[Inputs]) -> dict[str, dict[str, Any]]:
        """Return each int8 form's errors, beside its contestant's own float form."""
        found: dict[str, dict[str, Any]] = {}
        for name in names:
            ours, own_float = self._made[name], self._made.get(f"{name.split(', ')[0]}, {FLOAT}")
            if own_float is None:
                continue
            pairs = [(ours(*inputs), own_float(*inputs)) for inputs in held_out]
            found[name] = errors(pairs)
            if graph := self._eager.get(name):
                found[name] |= _beside_eager(ours, graph, held_out[0])
        return found


def is_off(accuracy: Mapping[str, Any]) -> bool:
    """Return whether Nimble's int8 is another net than eager's: further than its own sensitivity to rounding."""
    return bool(accuracy.get("from_eager", 0.0) > max(EAGER_TOLERANCE, 3 * accuracy.get("eager_moved", 0.0)))


def _beside_eager(ours: Function, graph: nn.Module, inputs: Inputs) -> dict[str, float]:
    """Return our distance from eager's int8, and eager's own when its input, or its largest table, moves by 1e-6."""
    from torch.utils._pytree import tree_leaves

    wanted = tree_leaves(graph(*inputs))
    moved = max(distance(tree_leaves(_moved(graph, inputs, by)), wanted) for by in (1e-6, -1e-6))
    return {"from_eager": distance(ours(*inputs), wanted), "eager_moved": moved}


def _moved(graph: nn.Module, inputs: Inputs, by: float) -> Any:
    if any(x.is_floating_point() for x in inputs):
        return graph(*(x * (1 + by) if x.is_floating_point() else x for x in inputs))
    table = max((each for each in graph.parameters() if each.is_floating_point()), key=lambda each: each.numel())
    kept = table.clone()
    table.mul_(1 + by)
    found = graph(*inputs)
    table.copy_(kept)
    return found


def report(
    races: Mapping[str, Outcomes], accuracy: Mapping[str, Mapping[str, Any]], num_threads: int, loads: Mapping[str, str]
) -> Section:
    """Return the races with the losses first, each case's accuracy, and all figures as data."""
    return report_of(FORMS, races, accuracy, num_threads, loads)

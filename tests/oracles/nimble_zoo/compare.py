"""One model, three ways through Nimble, each beside eager."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mlsys_core.errors import MlsysError
from mlsys_nimble import Nimble
from mlsys_nimble.dynamo import nimble
from mlsys_nimble.errors import InternalError
from mlsys_nimble.ir.trees import flatten
from torch import Tensor, nn
from torch.utils._pytree import tree_map

TOLERANCE = 2e-4  # of the largest element: rounding of a few dozen layers, Winograd's tiles among them
WAYS = ("prepare", "compile", "eager")


@dataclass
class Tally:
    """Outcomes of all cases."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)  # by case, why
    unstable: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, name: str, outcome: str, detail: str = "") -> None:
        """Count one case, and say what is not equal."""
        self.counts[outcome] += 1
        if outcome == "refused":
            self.refused[name] = detail
        elif outcome == "unstable":
            self.unstable[name] = detail
        elif outcome != "equal":
            self.faults.append(f"{outcome}: {name}: {detail}")
            print(self.faults[-1], flush=True)

    def note_error(self, name: str, error: Exception) -> None:
        """Count a case that raised: a refusal is an ``MlsysError`` that is no fault of ours."""
        if isinstance(error, MlsysError):
            text = " ".join(str(error).split())[:300]
            self.note(name, "raw" if isinstance(error, InternalError) else "refused", text)
        else:
            self.note(name, "raw", f"{type(error).__name__}: {str(error)[:300]}")

    def add(self, other: Tally) -> None:
        """Count the cases of another, too."""
        self.counts.update(other.counts)
        self.refused.update(other.refused)
        self.unstable.update(other.unstable)
        self.faults += other.faults

    def line(self) -> str:
        """``nimble-zoo: 12 cases: ...``; unstable: rounding decides in eager, too."""
        outcomes = ("equal", "unstable", "refused", "wrong", "raw")
        parts = ", ".join(f"{self.counts[name]:,} {name}" for name in outcomes)
        return f"nimble-zoo: {sum(self.counts.values()):,} cases: {parts}"


def check(tally: Tally, name: str, model: nn.Module, calls: list[dict[str, Any]], way: str, **options: Any) -> None:
    """Run the calls one after another, eagerly and one of Nimble's ways, each with its own objects; note what came.

    A call is a dictionary of keyword arguments; ``"args"`` in it are positional ones.
    """
    eager, ours = copy.deepcopy(model), model
    theirs_calls, our_calls = copy.deepcopy(calls), copy.deepcopy(calls)
    with torch.no_grad():
        expected = [flat_tensors(run(eager, call)) for call in theirs_calls]
    try:
        with torch.no_grad():
            runner = prepared(ours, our_calls[0], way, options)
            got = [flat_tensors(run(runner, call)) for call in our_calls]
    except Exception as error:  # noqa: BLE001 - what the oracle looks for
        tally.note_error(name, error)
        return
    worst = max((distance(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)
    states = distance(flat_tensors(our_calls), flat_tensors(theirs_calls))  # caches, written inputs
    buffers = distance(dict(ours.named_buffers()), dict(eager.named_buffers()))
    is_equal = max(worst, states, buffers) <= TOLERANCE
    if not is_equal and max(states, buffers) <= TOLERANCE:
        rounding = swing(eager, calls, expected)
        if worst <= rounding and is_equal_in_double(eager, calls, way, options):
            tally.note(name, "unstable", f"distance {worst:.2g}; eager's own {rounding:.2g}")
            return
    tally.note(name, "equal" if is_equal else "wrong", f"distance {worst:.2g}, of state {max(states, buffers):.2g}")


def swing(eager: nn.Module, calls: list[dict[str, Any]], expected: list[dict[str, Tensor]]) -> float:
    """Return how far eager's results move when inputs and weights move by one ulp; the largest of four tries."""
    largest = 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        nudged = [tree_map(_nudge, call) for call in copy.deepcopy(calls)]
        other = copy.deepcopy(eager)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.copy_(_nudge(parameter))
            moved = [flat_tensors(run(other, call)) for call in nudged]
        largest = max(largest, *(distance(a, b) for a, b in zip(moved, expected, strict=True)))
    return largest


def _nudge(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    up = torch.nextafter(leaf, torch.full_like(leaf, torch.inf))
    down = torch.nextafter(leaf, torch.full_like(leaf, -torch.inf))
    choice = torch.randint_like(leaf, 3)
    return torch.where(choice == 0, down, torch.where(choice == 1, leaf, up))


def is_equal_in_double(eager: nn.Module, calls: list[dict[str, Any]], way: str, options: dict[str, Any]) -> bool:
    """True if the same way gives what eager gives once both compute in float64: only rounding was between them.

    A fault of the schedule stays where rounding goes away, so that an unstable model cannot hide it.
    """
    eager = copy.deepcopy(eager).double()
    calls = [tree_map(_double, call) for call in copy.deepcopy(calls)]
    try:
        with torch.no_grad():
            expected = [flat_tensors(run(eager, copy.deepcopy(call))) for call in calls]
            runner = prepared(copy.deepcopy(eager), calls[0], way, options)
            got = [flat_tensors(run(runner, call)) for call in calls]
    except Exception:  # noqa: BLE001 - then nothing speaks for the schedule
        return False
    return all(distance(a, b) <= TOLERANCE / 1e4 for a, b in zip(got, expected, strict=True))


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def prepared(model: nn.Module, call: dict[str, Any], way: str, options: dict[str, Any]) -> Callable[..., Any]:
    if way == "compile":
        torch._dynamo.reset()
        compiled: Callable[..., Any] = torch.compile(model, backend=nimble, options=options)
        return compiled
    if way == "eager":
        torch._dynamo.reset()
        options = {**options, "fallback": "eager"}
    keywords = {name: value for name, value in copy.deepcopy(call).items() if name != "args"}
    return Nimble(model).prepare(copy.deepcopy(call.get("args", ())), example_kwargs=keywords, **options)


def run(model: Callable[..., Any], call: dict[str, Any]) -> Any:
    return model(*call.get("args", ()), **{name: value for name, value in call.items() if name != "args"})


def flat_tensors(tree: Any) -> dict[str, Tensor]:
    leaves = flatten(tree).leaves
    return {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference, over the largest element; infinite where shapes, dtypes or NaNs differ."""
    if ours.keys() != theirs.keys():
        return float("inf")
    worst = 0.0
    for name, expected in theirs.items():
        got = ours[name]
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            return float("inf")
        if not expected.numel():
            continue
        a, b = got.detach().double(), expected.detach().double()
        if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(
            a[~a.isfinite()].isnan(), b[~b.isfinite()].isnan()
        ):
            return float("inf")
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)))
    return worst


def check_training(tally: Tally, name: str, model: nn.Module, call: dict[str, Any]) -> None:
    """Compare results and the gradients of all parameters, in eval mode: dropout would draw otherwise."""
    eager = copy.deepcopy(model)
    expected = _step(eager, eager, copy.deepcopy(call))
    try:
        keywords = {key: value for key, value in call.items() if key != "args"}
        prepared = Nimble(model).prepare(call.get("args", ()), example_kwargs=keywords, training=True)
        got = _step(model, prepared, call)
    except Exception as error:  # noqa: BLE001 - what the oracle looks for
        tally.note_error(name, error)
        return
    worst = distance(got, expected)
    tally.note(name, "equal" if worst <= 5 * TOLERANCE else "wrong", f"distance {worst:.2g}")


def _step(model: nn.Module, run_model: Callable[..., Any], call: dict[str, Any]) -> dict[str, Tensor]:
    results = {key: value for key, value in flat_tensors(run(run_model, call)).items() if value.requires_grad}
    sum(value.double().square().mean() for value in results.values()).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    return {**{k: v.detach() for k, v in results.items()}, **{k: g / scale for k, g in gradients.items()}}

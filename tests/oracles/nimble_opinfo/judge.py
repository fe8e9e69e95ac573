"""Run a case eagerly and as Nimble runs it: equal, refused with a reason, or at fault."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from mlsys_core.errors import MlsysError
from mlsys_nimble.errors import InternalError
from mlsys_nimble.module import Nimble
from torch.utils._pytree import tree_leaves

from tests.oracles.nimble_opinfo import ambient
from tests.oracles.nimble_opinfo.cases import Call, Case
from tests.oracles.nimble_opinfo.compare import compare

Verdict = Literal["equal", "refused", "wrong", "raw", "not run"]
Run = Callable[..., list[Any]]  # tensors -> results, flat; gradients after them where a path has some
PATHS = ("native", "reference", "compile", "training", "training reference", "compiled training")


@dataclass(frozen=True)
class Judgement:
    """The verdict on a case, and its reason."""

    case: str
    path: str
    verdict: Verdict
    reason: str = ""


@dataclass
class Tally:
    """Counts of verdicts; faults are kept."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Judgement] = field(default_factory=list)

    def add(self, judgement: Judgement) -> None:
        """Count one."""
        self.counts[judgement.verdict] += 1
        if judgement.verdict in ("wrong", "raw"):
            self.faults.append(judgement)

    def __str__(self) -> str:
        ran = sum(count for verdict, count in self.counts.items() if verdict != "not run")
        shown = ", ".join(f"{self.counts[verdict]:,} {verdict}" for verdict in ("equal", "refused", "wrong", "raw"))
        return f"{self.name}: {ran:,} cases: {shown}"


def judge_in_modes(case: Case, path: str, modes: tuple[str, str]) -> Judgement:
    """Prepare a case in one ambient mode and call it in another; both must be left as they were."""
    case = replace(case, name=f"{case.name}, prepared in {modes[0] or 'no mode'}, called in {modes[1] or 'no mode'}")
    before = ambient.present()
    judgement = judge(case, path, modes)
    if (after := ambient.present()) != before:
        return replace(judgement, verdict="wrong", reason=f"modes {before} became {after}")
    return judgement


def judge(case: Case, path: str, modes: tuple[str, str] = ("", "")) -> Judgement:
    """Prepare and call twice; results, gradients, and what is left in the inputs must be as eager has them."""
    function, prepare = case.function, ambient.within(modes[0], partial(_prepare, case, path))
    case = replace(case, function=ambient.within(modes[1], case.function))
    learns = "training" in path
    with warnings.catch_warnings(), torch.set_grad_enabled(learns):
        warnings.simplefilter("ignore")

        try:
            theirs = clones(case.tensors)
            if modes[0] != modes[1]:
                ambient.within(modes[0], function)(*clones(case.tensors))
            expected = _run(case.function, theirs, learns=learns)
            if case.has_set_values and _varies(case, expected, learns=learns):
                return Judgement(case.name, path, "not run", "eager gives another result each time: unset memory")
        except Exception as error:  # noqa: BLE001 eager itself refuses: not a case
            return Judgement(case.name, path, "not run", f"eager: {type(error).__name__}")
        if learns and not any(_needs_gradient(tensor) for tensor in case.tensors):
            return Judgement(case.name, path, "not run", "nothing to learn")
        try:
            call = ambient.within(modes[1], prepare())
            for _ in range(2):
                ours = clones(case.tensors)
                got = _run(call, ours, learns=learns)
                scale = 20.0 if learns else 1.0  # gradients come by other formulas: AOTAutograd's
                difference = compare(got, expected, values=case.has_set_values, scale=scale)
                if difference and _is_as_near(case, got, expected, learns=learns):
                    difference = ""  # eager is as far from what float64 gives
                difference = difference or compare(ours, theirs)
                if difference:
                    return Judgement(case.name, path, "wrong", difference)
        except InternalError as error:
            return Judgement(case.name, path, "raw", str(error)[:300])
        except MlsysError as error:
            return Judgement(case.name, path, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 what the oracle looks for
            if "compile" in path and _fails_without_nimble(case, learns=learns):
                return Judgement(case.name, path, "not run", f"torch.compile with any backend: {type(error).__name__}")
            return Judgement(case.name, path, "raw", f"{type(error).__name__}: {str(error)[:300]}")
    return Judgement(case.name, path, "equal")


def _prepare(case: Case, path: str) -> Callable[..., Any]:
    model = Call(case.function)
    if "compile" in path:
        return _compiled(case, "nimble", options={"num_threads": 1})
    if "training" in path:
        executor = "reference" if "reference" in path else "auto"
        examples = tuple(t.requires_grad_() if _needs_gradient(t) else t for t in clones(case.tensors))
        return Nimble(model).prepare(examples, training=True, executor=executor, num_threads=1)
    return Nimble(model).prepare(clones(case.tensors), executor=path, num_threads=1)


def _compiled(case: Case, backend: str, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(Call(case.function), backend=backend, dynamic=False, **options)
    return compiled


def _fails_without_nimble(case: Case, *, learns: bool) -> bool:
    try:
        _run(_compiled(case, "aot_eager" if learns else "eager"), clones(case.tensors), learns=learns)
    except Exception:  # noqa: BLE001 whatever it is
        return True
    return False


def clones(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each in memory of its own."""
    return tuple(tensor.clone() for tensor in tensors)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _run(function: Callable[..., Any], tensors: Sequence[torch.Tensor], *, learns: bool) -> list[Any]:
    """Results, and gradients of their sums with respect to what has gradients."""
    torch.manual_seed(1)
    if not learns:
        return _flat(function(*tensors))
    leaves = [tensor.requires_grad_() for tensor in tensors if _needs_gradient(tensor)]
    results = _flat(function(*tensors))
    learnt = [y for y in results if isinstance(y, torch.Tensor) and y.requires_grad]
    if not learnt:
        return results
    weights = [torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape).to(y) for y in learnt]
    return [*results, *_flat(torch.autograd.grad(learnt, leaves, weights, allow_unused=True, materialize_grads=True))]


def _is_as_near(case: Case, ours: list[Any], theirs: list[Any], *, learns: bool) -> bool:
    """Return whether ours is as near to the result in float64 as eager's is: rounding, magnified by the case."""
    wide = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in case.tensors)
    try:
        exact = _run(case.function, clones(wide), learns=learns)
    except Exception:  # noqa: BLE001 the operator has no float64
        return False
    if [x.shape for x in ours] != [x.shape for x in exact]:
        return False
    errors = [_error(tensors, exact) for tensors in (ours, theirs)]
    largest = max((float(x.double().abs().max()) for x in exact if x.numel()), default=0.0)
    return errors[0] <= 2 * errors[1] <= 0.5 * largest


def _error(tensors: list[Any], exact: list[Any]) -> float:
    """The largest difference; infinite where one side alone is no number."""
    pairs = [(x.double(), y.double()) for x, y in zip(tensors, exact, strict=True) if x.numel()]
    differences = [
        (x - y).nan_to_num(nan=torch.inf).masked_fill((x == y) | (x.isnan() & y.isnan()), 0) for x, y in pairs
    ]
    return max((float(difference.abs().max()) for difference in differences), default=0.0)


def _varies(case: Case, expected: list[Any], *, learns: bool) -> bool:
    """Return whether eager's result was never written: it changes where torch fills memory, or with its address."""
    kept = [torch.full_like(x, 77) for x in expected if isinstance(x, torch.Tensor)]  # so that memory lies elsewhere
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    try:
        for _ in range(4):
            again = _run(case.function, clones(case.tensors), learns=learns)
            if compare(again, expected):
                return True
            kept += [x for x in again if isinstance(x, torch.Tensor)]
    finally:
        torch.use_deterministic_algorithms(False)
    return False


def _flat(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if leaf is not None]

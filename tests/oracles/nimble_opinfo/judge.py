"""Run a case eagerly and as Nimble runs it: equal, refused with a reason, or at fault."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from mlsys_core.errors import MlsysError
from mlsys_nimble.module import Nimble
from torch.utils._pytree import tree_leaves

from tests.oracles.nimble_opinfo.cases import Call, Case

Verdict = Literal["equal", "refused", "wrong", "raw", "not run"]
RELATIVE = {  # of the largest element of the result: sums are added in another order, functions are rounded otherwise
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


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


def replayed(executor: str) -> Callable[[Case], Callable[..., Any]]:
    """``Nimble(...).prepare`` with an executor."""

    def prepare(case: Case) -> Callable[..., Any]:
        return Nimble(Call(case.function)).prepare(clones(case.tensors), executor=executor, num_threads=1)

    return prepare


def clones(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each in memory of its own."""
    return tuple(tensor.clone() for tensor in tensors)


def judge(case: Case, path: str, prepare: Callable[[Case], Callable[..., Any]]) -> Judgement:
    """Prepare and call; the results, and what is left in the inputs, must be as eager has them."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = clones(case.tensors)
        try:
            torch.manual_seed(1)
            expected = _tensors(case.function(*theirs))
            again = clones(case.tensors)
            spoilt = [torch.full_like(x, 77) for x in expected if isinstance(x, torch.Tensor)]
            del spoilt
            torch.manual_seed(1)
            if case.has_set_values and compare(_tensors(case.function(*again)), expected):
                return Judgement(case.name, path, "not run", "eager gives another result each time: unset memory")
        except Exception as error:  # noqa: BLE001
            return Judgement(case.name, path, "not run", f"eager: {type(error).__name__}")
        try:
            call = prepare(case)
            for _ in range(2):
                ours = clones(case.tensors)
                torch.manual_seed(1)
                difference = compare(_tensors(call(*ours)), expected, values=case.has_set_values)
                difference = difference or compare(ours, theirs)
                if difference:
                    return Judgement(case.name, path, "wrong", difference)
        except MlsysError as error:
            return Judgement(case.name, path, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001
            return Judgement(case.name, path, "raw", f"{type(error).__name__}: {str(error)[:300]}")
    return Judgement(case.name, path, "equal")


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if leaf is not None]


def compare(actual: Iterable[Any], expected: Iterable[Any], *, values: bool = True, scale: float = 1.0) -> str:
    """What differs, or ""."""
    actual, expected = list(actual), list(expected)
    if len(actual) != len(expected):
        return f"{len(actual)} results, not {len(expected)}"
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            if ours != theirs and theirs == theirs:
                return f"result {number} is {ours!r}, not {theirs!r}"
            continue
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return f"result {number} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        if values and (difference := _difference(ours.detach(), theirs.detach(), scale)):
            return f"result {number}: {difference}"
    return ""


def _difference(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> str:
    tolerance = RELATIVE.get(theirs.dtype, 0.0) * scale
    if not theirs.numel() or torch.equal(ours, theirs):
        return ""
    if not tolerance:
        return f"{int((ours != theirs).sum())} of {theirs.numel()} elements differ"
    finite = theirs[torch.isfinite(theirs)].abs()
    largest = float(finite.max()) if finite.numel() else 1.0
    try:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""

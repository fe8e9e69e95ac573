"""Judge a program of writes: results and arguments of several calls, at once and after the calls that follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from mlsys_core.errors import MlsysError
from mlsys_nimble import prepared
from mlsys_nimble.capture.aliases import shares_memory
from mlsys_nimble.errors import InternalError
from mlsys_nimble.module import Nimble
from mlsys_nimble.passes import PASSES

from tests.oracles.nimble_opinfo.cases import Call
from tests.oracles.nimble_opinfo.compare import compare
from tests.oracles.nimble_opinfo.judge import Judgement, Tally
from tests.oracles.nimble_writes.grammar import CALLS, Program, program

Run = Callable[..., Sequence[torch.Tensor]]
ROUNDED = ("addcmul", "lerp", "sin_", "softmax", "cumsum", "sum", "mean", "@", "pow_", "alpha")


def judge(program: Program, path: str, prepare: Callable[[Program, Run], Run] | None = None) -> Judgement:
    """Compare with eager; ``path`` is an executor, "compile", or "some passes", by the program's seed, or a peer."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = _judged(program, path, prepare or partial(_prepared, path=path))
        if found.verdict == "wrong" and _rounding_decides(program):
            return replace(found, verdict="not run", reason="rounding decides")
        if path == "compile" and found.verdict in ("wrong", "raw") and _fails_in_eager_graphs(program):
            return replace(found, verdict="not run", reason=f"torch.compile itself: {found.reason}")
    return found


def _judged(program: Program, path: str, prepare: Callable[[Program, Run], Run]) -> Judgement:
    function = program.function()
    try:
        function(*program.arguments(0))
    except Exception as error:  # noqa: BLE001 not a program
        return Judgement(str(program), path, "not run", f"eager: {type(error).__name__}")
    try:
        with patch.object(prepared, "PASSES", _passes(program.seed, path)):
            difference = _first_difference(program, function, prepare(program, function))
    except InternalError as error:
        return Judgement(str(program), path, "raw", str(error)[:300])
    except MlsysError as error:
        return Judgement(str(program), path, "refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 what the oracle looks for
        if "torch._dynamo" in type(error).__module__:
            return Judgement(str(program), path, "not run", f"torch.compile itself: {type(error).__name__}")
        return Judgement(str(program), path, "raw", f"{type(error).__name__}: {str(error)[:300]}")
    return Judgement(str(program), path, "wrong" if difference else "equal", difference)


def _prepared(program: Program, function: Run, path: str) -> Run:
    if path == "compile":
        torch._dynamo.reset()
        return torch.compile(Call(function), backend="nimble", dynamic=False, options={"num_threads": 1})
    executor = "native" if path == "some passes" else path
    return Nimble(Call(function)).prepare(program.arguments(0), executor=executor, num_threads=1)


def _rounding_decides(program: Program) -> bool:
    """Return whether the program shows bits, or eager gives other results where arguments differ in their last one."""
    function, text = program.function(), "; ".join(program.lines)
    dtype: torch.dtype = getattr(torch, program.dtype)
    words = (*ROUNDED, "mul", "*") if dtype.is_complex else ROUNDED
    if not any(map(text.count, words)) or not (dtype.is_floating_point or dtype.is_complex):
        return False
    if ".view(torch." in text:  # shows every rounding, also one that follows a floor
        return True
    bit = 2.0**-24 if dtype == torch.float64 and ".float()" in text else torch.finfo(dtype).eps

    def nudged(*args: torch.Tensor) -> Sequence[torch.Tensor]:
        for each in args:
            if not torch._debug_has_internal_overlap(each):
                each.mul_(1 + bit * torch.randn(each.shape, generator=generator).clamp(-1, 1).to(dtype))
        return function(*args)

    generator = torch.Generator().manual_seed(program.seed)
    return any(_first_difference(program, function, nudged) for _ in range(8))


def _fails_in_eager_graphs(program: Program) -> bool:
    """Return whether torch.compile fails with a backend that runs graphs eagerly; their results lie row by row."""

    def backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Run:
        def run(*args: Any) -> Sequence[Any]:
            results = graph(*args)
            given = [each for each in (*args, *results) if isinstance(each, torch.Tensor)]
            return [
                each if sum(shares_memory(each, other) for other in given) > 1 else each.contiguous()
                for each in results
            ]

        return run

    torch._dynamo.reset()
    function = program.function()
    try:
        return bool(_first_difference(program, function, torch.compile(Call(function), backend=backend, dynamic=False)))
    except Exception:  # noqa: BLE001 whatever it is, it is torch's own
        return True


def _passes(seed: int, path: str) -> tuple[Any, ...]:
    return tuple(one for n, one in enumerate(PASSES) if path != "some passes" or seed >> n % 11 & 1)


def _first_difference(program: Program, eager: Run, run: Run) -> str:
    """Call both, write to a result, and call both on a result; compare all that is known after each."""
    theirs: list[list[Any]] = []  # of each call: results, then arguments
    ours: list[list[Any]] = []
    for call in range(CALLS):
        given, same = program.arguments(call), program.arguments(call)
        if call == CALLS - 1:
            if not any(torch._debug_has_internal_overlap(results[-1][0]) for results in (theirs, ours)):
                theirs[-1][0].zero_()
                ours[-1][0].zero_()
            if difference := _compared(ours, theirs):
                return f"a write to a result: {difference}"
            one, other = theirs[0][0], ours[0][0]
            is_fit = (one.shape, one.dtype) == (given[0].shape, given[0].dtype)
            if is_fit and one.stride() == other.stride():  # ours lie row by row; another layout is another program
                given, same = (one, given[1]), (other, same[1])
        try:
            theirs.append([*eager(*given), *given])
        except RuntimeError:  # as for a write to an expanded argument
            break
        ours.append([*run(*same), *same])
        if difference := _compared(ours, theirs):
            return f"call {call}: {difference}"
    return ""


def _compared(ours: list[list[Any]], theirs: list[list[Any]]) -> str:
    found = (
        f"of call {n}, {compare(*pair)}" for n, pair in enumerate(zip(ours, theirs, strict=True)) if compare(*pair)
    )
    return next(found, "")


def shrunk(program: Program, path: str) -> Program:
    """Return a smaller program with the same verdict."""
    verdict = judge(program, path).verdict

    def fails(smaller: Program) -> bool:
        return bool(smaller.outputs) and judge(smaller, path).verdict == verdict

    is_smaller = True
    while is_smaller:
        is_smaller = False
        options = [replace(program, lies=("plain",) * CALLS)] if set(program.lies) > {"plain"} else []
        for field in ("lines", "outputs"):
            items = getattr(program, field)
            options += [replace(program, **{field: items[:n] + items[n + 1 :]}) for n in reversed(range(len(items)))]
        for option in options:
            if fails(option):
                program, is_smaller = option, True
                break
    return program


PATHS = ("native", "some passes", "native", "reference", "some passes", "native", "some passes")


def tally_of(seeds: Iterable[int]) -> Tally:
    """Judge the programs of some seeds, each along a path; faults are shrunk."""
    tally = Tally("nimble-writes")
    for seed in seeds:
        drawn, path = program(seed), "compile" if seed % 50 == 49 else PATHS[seed % len(PATHS)]
        if drawn is None:
            continue
        found = judge(drawn, path)
        tally.add(judge(shrunk(drawn, path), path) if found.verdict in ("wrong", "raw") else found)
    return tally

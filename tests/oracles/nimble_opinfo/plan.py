"""Which cases an oracle's run takes: all operators, in turns that no clock and no chance decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.oracles.nimble_opinfo.ambient import MODES
from tests.oracles.nimble_opinfo.cases import DTYPES, VARIANTS, cases_of, operators
from tests.oracles.nimble_opinfo.judge import Judgement, judge, judge_in_modes

DIFFERENTIABLE = ("float32", "float64", "complex64", "float32")

FLOATS = ("float32", "float32", "bfloat16", "float64")
AMBIENT_PATHS = ("native", "native", "reference", "native", "native", "native", "native", "compile", "native")


@dataclass(frozen=True)
class Work:
    """One operator, for one dtype, along one path."""

    number: int  # of the operator in OpInfo's table
    dtype: str
    path: str
    variants: tuple[str, ...]
    most_samples: int = 1
    modes: tuple[str, str] | None = None  # ambient modes in which it is prepared, and called


def whole() -> Iterator[Work]:
    """The whole run: every operator and dtype natively in every variant, the other paths in turns."""
    for number in range(len(operators())):
        for turn, dtype in enumerate(DTYPES):
            yield Work(number, dtype, "native", VARIANTS, most_samples=2 if dtype == "float32" else 1)
            yield Work(number, dtype, "reference", (VARIANTS[(number + turn) % len(VARIANTS)],))
        turn = VARIANTS[number % len(VARIANTS)]
        learns = DIFFERENTIABLE[number % len(DIFFERENTIABLE)]
        yield Work(number, learns, "training", ("plain",))
        yield Work(number, "float32", "training" if number % 4 else "training reference", (turn,))
        yield Work(number, DTYPES[number % len(DTYPES)], "compile", (turn,))
        yield Work(number, "float32", ("compile", "compiled training")[number % 2], ("plain",))


def bounded() -> Iterator[Work]:
    """Yield the part for every run of the tests: a sixth of the operators, others in a variant, few on slow paths."""
    for number in range(len(operators())):
        path = "reference" if number % 5 == 4 else "native"
        if number // 6 % 6 == 0:
            yield Work(number, DTYPES[number % len(DTYPES)], path, ("plain",))
        if number // 6 % 12 == 1:
            yield Work(number, "float32", path, (VARIANTS[number // 14 % len(VARIANTS)],))
        if number % 94 == 0:
            yield Work(number, "float32", ("training", "compile", "compiled training")[number // 47 % 3], ("plain",))


def judgements(work: Work) -> Iterator[Judgement]:
    """The verdicts on a piece of work."""
    for case in cases_of(operators()[work.number], work.dtype, most_samples=work.most_samples, variants=work.variants):
        yield judge(case, work.path) if work.modes is None else judge_in_modes(case, work.path, work.modes)


def in_modes() -> Iterator[Work]:
    """Yield every operator under each ambient mode, prepared in that mode or in another by turns."""
    modes = [*MODES]
    for number in range(len(operators())):
        for turn, mode in enumerate(modes):
            dtype = FLOATS[(number + turn) % len(FLOATS)]
            path = AMBIENT_PATHS[(number + turn) % len(AMBIENT_PATHS)]
            other = (mode, "", modes[(number + turn) % len(modes)])[(number // 3 + turn) % 3]
            variant = VARIANTS[(number + turn) % len(VARIANTS)] if number % 2 else "plain"
            yield Work(number, dtype, path, (variant,), modes=(other, mode))

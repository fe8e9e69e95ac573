"""Judge operators with numbers: all numbers of an operator, dtype and rank in one model, singly where they differ."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mlsys_nimble.module import Nimble

from tests.oracles.nimble_opinfo.cases import Call, Case
from tests.oracles.nimble_opinfo.judge import Judgement, judge
from tests.oracles.nimble_scalars.cases import cases, singly


def judgements(operator: str, dtype: str, rank: int, path: str) -> Iterator[Judgement]:
    """Yield one verdict for each number."""
    for case in cases(operator, dtype, rank):
        whole = judged(case, path)
        for one in singly(case):
            yield Judgement(one.name, path, "equal") if whole.verdict == "equal" else judged(one, path)


def judged(case: Case, path: str) -> Judgement:
    """As the other oracles judge; 16-bit floats to the bit, as each of torch's operators rounds."""
    found = judge(case, path)
    (x,) = case.tensors
    if found.verdict != "equal" or x.dtype not in (torch.float16, torch.bfloat16):
        return found
    ours = Nimble(Call(case.function)).prepare(x.clone(), executor=path, num_threads=1)(x.clone())
    for got, wanted in zip(ours, case.function(x.clone()), strict=True):
        if not bool(((got == wanted) | (got.isnan() & wanted.isnan())).all()):
            return Judgement(case.name, path, "wrong", f"{got.tolist()}, not {wanted.tolist()}")
    return found

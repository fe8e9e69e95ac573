"""The compiled loops against the cells' own modules, step by step on each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.cells.gru import WordGRUCell, WordGRUDecoderCell
from mlsys_batchmaker.cells.lstm import LSTMCell, StackedLSTMCell, WordLSTMCell, WordLSTMDecoderCell
from mlsys_batchmaker.cells.tree import TreeInnerCell, TreeLeafCell
from mlsys_batchmaker.native import runner
from mlsys_batchmaker.native.runner import MAX_TABLE_BYTES, HasForm, PackedCell, Runner, pack_or_none
from mlsys_core.native.loader import builds_to_test
from torch import Tensor, nn

WORDS = 11
BUILDS = builds_to_test()
ROOM = 64  # rows of a bank
CHAINS = {
    "lstm": lambda h: LSTMCell(h + 3, h),
    "word-lstm": lambda h: WordLSTMCell(WORDS, h),
    "stacked-lstm": lambda h: StackedLSTMCell(5, h, 3),
    "lstm-decoder": lambda h: WordLSTMDecoderCell(WORDS, h),
    "gru": lambda h: WordGRUCell(WORDS, 6, h),
    "gru-decoder": lambda h: WordGRUDecoderCell(WORDS, 6, h),
}
TREES = {"leaf": lambda h: TreeLeafCell(WORDS, h), "inner": TreeInnerCell}
KINDS = {**CHAINS, **TREES}


def banks(module: nn.Module, rng: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """A bank for each input and each output, with numbers in the inputs'; row 0 of states is zeros."""
    inputs, outputs = module.ports()
    made = []
    for port in inputs:
        if port.dtype == "int64":
            made.append(torch.randint(0, WORDS, (ROOM,), generator=rng))
        else:
            made.append(torch.randn(ROOM, *port.shape, generator=rng))
            made[-1][0] = 0
    return made, [torch.zeros(ROOM, *port.shape, dtype=getattr(torch, port.dtype)) for port in outputs]


def alone(module: nn.Module, held: list[Tensor], in_rows: np.ndarray, steps: int) -> list[tuple[Tensor, ...]]:
    """Outputs of each step of one row, [1, ...]: what a chain carries comes from the step before."""
    names_in, names_out = ([port.name for port in ports] for ports in module.ports())
    found: list[tuple[Tensor, ...]] = []
    for step in range(steps):
        values = []
        for index, name in enumerate(names_in):
            if step and name in names_out:
                values.append(found[-1][names_out.index(name)])
            else:
                values.append(held[index][in_rows[step, index]][None])
        out = module(*values)
        found.append((out,) if isinstance(out, Tensor) else tuple(out))
    return found


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    hidden=st.integers(1, 40),
    rows=st.integers(1, 15),
    steps=st.integers(1, 20),
    has_table=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_as_the_module(kind: str, hidden: int, rows: int, steps: int, has_table: bool, seed: int):
    require_as_the_module(kind, hidden, rows, steps, has_table=has_table, seed=seed)


@pytest.mark.parametrize("level", BUILDS)
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_of_any_width(kind: str, lanes: int, level: str, monkeypatch: pytest.MonkeyPatch):
    """Vectors and panels of other machines, and more rows than are multiplied at once."""
    load = runner.load
    monkeypatch.setattr(runner, "load", lambda: load((*BUILDS[level], f"-DMLSYS_LANES={lanes}")))
    for seed, (hidden, rows, steps) in enumerate([(1, 1, 1), (33, 13, 3), (47, 64, 2)]):
        require_as_the_module(kind, hidden, rows, steps, has_table=seed != 1, seed=seed)


def require_as_the_module(kind: str, hidden: int, rows: int, steps: int, *, has_table: bool, seed: int) -> None:
    torch.manual_seed(seed)
    module = KINDS[kind](hidden).eval()
    steps = 1 if kind in TREES else steps
    packed = PackedCell(module.form(), max_table_bytes=MAX_TABLE_BYTES if has_table else 0)
    held, written = banks(module, torch.Generator().manual_seed(seed))
    rng = np.random.default_rng(seed)
    in_rows = rng.integers(0, ROOM, (steps, rows, len(held)))
    out_rows = np.stack([rng.permutation(ROOM)[:rows] for _ in written], axis=1)
    lengths = np.sort(rng.integers(1, steps + 1, rows))[::-1]
    lengths[0] = steps
    runner = Runner(packed, held, written)
    with torch.inference_mode():
        assert runner.run(in_rows, out_rows, lengths) == 0
        names = [port.name for port in module.ports()[1]]
        for row, length in enumerate(lengths.tolist()):
            expected = alone(module, held, in_rows[:, row], length)
            for output, name in enumerate(names):
                got = written[output][out_rows[row, output]]
                torch.testing.assert_close(got, expected[-1][output][0], rtol=0, atol=2e-6)
                if not name.startswith("c"):  # cell states are kept of the last step only
                    at = np.arange(length)
                    each = torch.from_numpy(runner.results(output, at, np.full(length, row)))
                    torch.testing.assert_close(each, torch.cat([step[output] for step in expected]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", sorted(CHAINS))
def test_a_row_may_be_read_and_written(kind: str):
    torch.manual_seed(0)
    module = CHAINS[kind](20)
    held, _ = banks(module, torch.Generator().manual_seed(0))
    inputs, outputs = ([port.name for port in ports] for ports in module.ports())
    shared = [held[inputs.index(name)] for name in outputs]
    in_rows = np.broadcast_to(np.arange(1, 8)[:, None], (7, len(held)))[None].repeat(3, axis=0)
    expected = [alone(module, [bank.clone() for bank in held], in_rows[:, row], 3)[-1] for row in range(7)]
    Runner(PackedCell(module.form()), held, shared).run(in_rows, in_rows[0][:, : len(shared)].copy(), None)
    for row in range(7):
        for output, bank in enumerate(shared):
            torch.testing.assert_close(bank[row + 1], expected[row][output][0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["lstm-decoder", "gru-decoder"])
def test_rows_that_have_stopped_drop_out(kind: str):
    torch.manual_seed(1)
    module = CHAINS[kind](16)
    held, written = banks(module, torch.Generator().manual_seed(1))
    steps, rows = 9, 12
    in_rows = np.broadcast_to(np.arange(rows)[None, :, None], (steps, rows, len(held)))
    out_rows = np.broadcast_to(np.arange(rows)[:, None], (rows, len(written)))
    with torch.inference_mode():
        expected = [alone(module, held, in_rows[:, row], steps) for row in range(rows)]
    said = np.array([[int(step[0]) for step in row] for row in expected])
    stop = int(said[0, 3])
    ends = [row.tolist().index(stop) + 1 if stop in row else steps for row in said]
    runner = Runner(PackedCell(module.form(), stop=stop), held, written)
    skipped = runner.run(in_rows, out_rows, None)
    assert skipped == rows * steps - sum(ends) > 0
    for row, end in enumerate(ends):
        words = runner.results(0, np.arange(steps), np.full(steps, row))
        assert words[:end].tolist() == said[row, :end].tolist()
        assert (words[end:] == stop).all()
        for output, bank in enumerate(written):
            torch.testing.assert_close(bank[row], expected[row][end - 1][output][0], rtol=0, atol=2e-6)


def test_carries():
    runner = Runner(PackedCell(WordLSTMDecoderCell(WORDS, 4).form()), *banks(WordLSTMDecoderCell(WORDS, 4), None))
    assert runner.carries((0, 1, 2))
    assert not runner.carries((-1, 1, 2))  # a word given at each step: the loops would feed back their own
    tree = TreeInnerCell(4)
    assert not Runner(PackedCell(tree.form()), *banks(tree, None)).carries((0, -1, 1, -1))


def test_other_precisions_have_no_loops():
    cell = LSTMCell(4, 4)
    assert isinstance(cell, HasForm)
    assert pack_or_none(cell.form()) is not None
    assert pack_or_none(cell.double().form()) is None

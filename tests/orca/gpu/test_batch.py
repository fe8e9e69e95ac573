from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import MemoryPlanError
from mlsys_orca.backends.triton.batch import DeviceBatch, to_device
from mlsys_orca.backends.triton.plan import TileShape, plan_attention
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from torch import Tensor

TILE = TileShape(num_rows=16, num_keys=16, split_keys=32, group=2)
BLOCK = 4
LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=6)  # rows, keys before them


def iteration(lengths: Iterable[tuple[int, int]], random: torch.Generator) -> IterationBatch:
    builder = BatchBuilder()
    for number, (rows, before) in enumerate(lengths):
        table = torch.randperm(100, generator=random)[: -(-(rows + before) // BLOCK)].tolist()
        sampling = SamplingParams() if number % 3 else None
        tokens = range(7 * number, 7 * number + rows)
        builder.add(str(number), tokens, num_computed_tokens=before, block_table=tuple(table), sampling=sampling)
    return builder.build()


@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_device_gets_what_the_host_has(lengths: list[tuple[int, int]], seed: int) -> None:
    batch = iteration(lengths, torch.Generator().manual_seed(seed))
    inputs = ForwardInputs(batch, block_size=BLOCK, device="cpu")
    there = to_device(inputs, TILE)
    for name in ("token_ids", "positions", "slots", "sampled_rows"):
        assert torch.equal(getattr(there, name), getattr(inputs, name))
    for row, request in zip(there.ragged.block_tables.tolist(), batch.requests, strict=True):
        assert tuple(row[: len(request.block_table)]) == request.block_table
    plan = plan_attention([rows for rows, _ in lengths], [sum(both) for both in lengths], TILE)
    assert there.ragged.items.tolist() == plan.items.tolist()
    assert there.ragged.merges.tolist() == plan.merges.tolist()
    assert there.ragged.num_partial_rows == plan.num_partial_rows


def test_everything_crosses_in_one_copy_and_is_aligned() -> None:
    """A kernel would be compiled again for a tensor that begins between two multiples of 16 bytes."""
    batch = iteration([(3, 0), (1, 8), (5, 40)], torch.Generator())
    there = to_device(ForwardInputs(batch, block_size=BLOCK, device="cpu"), TILE)
    tensors = [tensor for part in (there, there.ragged) for tensor in _tensors(part)]
    assert len(tensors) == 7
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in tensors)


def _tensors(part: DeviceBatch | object) -> list[Tensor]:
    values = [getattr(part, name) for name in type(part).__slots__]  # type: ignore[attr-defined]
    return [value for value in values if isinstance(value, Tensor)]


def test_other_rows_can_be_wanted() -> None:
    batch = iteration([(3, 0), (1, 8)], torch.Generator())
    there = to_device(ForwardInputs(batch, block_size=BLOCK, device="cpu", wanted=[2, 0]), TILE)
    assert there.sampled_rows.tolist() == [2, 0]


def test_a_table_too_short_is_refused() -> None:
    builder = BatchBuilder()
    builder.add("a", [1] * 9, num_computed_tokens=0, block_table=(0, 1), sampling=None)
    with pytest.raises(MemoryPlanError, match="2 K/V blocks of 4 do not hold 9 tokens"):
        to_device(ForwardInputs(builder.build(), block_size=BLOCK, device="cpu"), TILE)

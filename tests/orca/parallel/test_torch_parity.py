"""Parts of a model in torch's operators give the bits of one process that slices its sums, whatever the degrees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mlsys_orca.backends.runner import intra_op_threads

from tests.orca.parallel.places import (
    SEQ2SEQ,
    assert_equal,
    run_places,
    run_sliced,
    run_whole,
    some_batches,
    some_translations,
)

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "weights": "float"},
    "bf16": {"dtype": "bf16", "weights": "float"},
    "int8": {"dtype": "fp32", "weights": "int8"},
}
DEGREES = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]  # of floats; two of them in the other forms


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """torch may divide a sum over its threads: their number is part of the promise."""
    with intra_op_threads(1):
        yield


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma2", "mixtral", "opt", *SEQ2SEQ])
def test_parts_in_torch_give_the_bits_of_one_sliced_process(checkpoints: Any, name: str, form: str) -> None:
    path, options = checkpoints(name), FORMS[form] | {"backend": "torch"}
    batches = some_translations() if name in SEQ2SEQ else some_batches()
    expected = run_sliced(path, batches, **options)
    for ranks, stages in DEGREES if form == "fp32" else ((4, 1), (2, 2)):
        assert_equal(run_places(path, batches, ranks=ranks, stages=stages, slices=True, **options), expected)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma2", "mixtral", "opt", *SEQ2SEQ])
def test_slices_change_no_more_than_the_rounding(checkpoints: Any, name: str) -> None:
    path, options = checkpoints(name), {"dtype": "fp32", "weights": "float", "backend": "torch"}
    batches = some_translations() if name in SEQ2SEQ else some_batches()
    whole = run_whole(path, batches, **options)
    for one, other in zip(run_sliced(path, batches, **options), whole, strict=True):
        assert torch.allclose(one.logits, other.logits, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_ranks_of_two_threads_give_the_bits_of_one_process_of_two(checkpoints: Any, name: str) -> None:
    path, options = checkpoints(name), {"dtype": "bf16", "weights": "float", "backend": "torch", "num_threads": 2}
    batches = some_translations() if name in SEQ2SEQ else some_batches()
    expected = run_sliced(path, batches, **options)
    for ranks, stages in ((2, 1), (2, 2)):
        assert_equal(run_places(path, batches, ranks=ranks, stages=stages, **options), expected)


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_stages_alone_give_the_bits_of_one_process(checkpoints: Any, name: str) -> None:
    path, options = checkpoints(name), {"dtype": "bf16", "weights": "float", "backend": "torch"}
    batches = some_translations() if name in SEQ2SEQ else some_batches()
    expected = run_whole(path, batches, **options)
    for stages in (2, 3):
        assert_equal(run_places(path, batches, ranks=1, stages=stages, **options), expected)

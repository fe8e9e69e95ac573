"""The real sentence encoder under ``torch.compile(backend="nimble")`` gives the embeddings it gives without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model
from mlsys_nimble import Nimble
from mlsys_nimble.dynamo import nimble
from torch import Tensor

SENTENCES = [
    "A schedule is made once.",
    "It is then replayed, again and again, without asking what comes next.",
    "Yes.",
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return resolve_model("all-minilm-l6-v2", tmp_path_factory.mktemp("cache"))
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def encoder(model_path: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(model_path).eval()


@pytest.fixture(scope="module")
def batch(model_path: Path) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(model_path)(SENTENCES, padding=True, return_tensors="pt"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def embeddings(encoder: Any, batch: dict[str, Tensor]) -> Tensor:
    """Means of the last layer over a sentence's tokens, of length one."""
    with torch.no_grad():
        states = encoder(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.model
@pytest.mark.parametrize("executor", ["reference", "native"])
def test_compiled_embeddings_are_the_same(encoder: Any, batch: dict[str, Tensor], executor: str):
    compiled = torch.compile(encoder, backend=nimble, options={"executor": executor})
    expected = embeddings(encoder, batch)
    torch.testing.assert_close(embeddings(compiled, batch), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embeddings(compiled, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.model
def test_prepared_embeddings_are_the_same(encoder: Any, batch: dict[str, Tensor]):
    prepared = Nimble(encoder).prepare((), example_kwargs=batch, executor="reference")
    torch.testing.assert_close(embeddings(prepared, batch), embeddings(encoder, batch), rtol=1e-4, atol=1e-5)
    assert prepared.prepared is not None
    kinds = [type(operator.kind).__name__ for operator in prepared.prepared.program.operators]
    assert kinds.count("Attention") == 6
    assert kinds.count("Linear") >= 36
    assert "Aten" not in kinds

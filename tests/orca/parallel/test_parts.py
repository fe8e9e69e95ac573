"""A divided model before its parts are loaded: what is refused, and what a rank must agree on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.plan_writer import LoweringError
from mlsys_orca.cli.options import refuse_divided
from mlsys_orca.parallel import loading, parts
from mlsys_orca.parallel.parts import digest_of, divide
from mlsys_orca.parallel.placement import Placement


def test_the_master_has_no_weights(six_layers: Path) -> None:
    loaded, model = divide(six_layers, tensor_parallel=2, pipeline_parallel=3, dtype="fp32")
    assert [(place.stage, place.rank) for place in model.places] == [(s, r) for s in range(3) for r in range(2)]
    with pytest.raises(InvalidInputError, match="no weights"):
        loaded.model(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "stages", "fitting"), [(3, 1, "1, 2 or 4 do"), (1, 4, "1, 2, 3 or 6 do")])
def test_degrees_that_do_not_fit_are_refused_with_those_that_do(
    six_layers: Path, ranks: int, stages: int, fitting: str
) -> None:
    with pytest.raises(InvalidInputError, match=fitting):
        divide(six_layers, tensor_parallel=ranks, pipeline_parallel=stages)


def test_weights_that_do_not_fit_the_memory_are_refused(six_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(memory_info=lambda: SimpleNamespace(available_nbytes=1000))
    monkeypatch.setattr(parts, "get_device", lambda _: device)
    with pytest.raises(InvalidInputError, match="free memory, or take a smaller form"):
        divide(six_layers, tensor_parallel=2, pipeline_parallel=1)


def test_a_digest_tells_forms_and_files_apart(six_layers: Path, tmp_path: Path) -> None:
    loaded, _ = divide(six_layers, tensor_parallel=2, pipeline_parallel=1, dtype="fp32")
    longer = tmp_path / six_layers.name
    longer.write_bytes(six_layers.read_bytes() + b"0")
    made = [
        digest_of(path, loaded.config, dtype=dtype, weights=form)
        for path in (six_layers, longer)
        for dtype in ("fp32", "bf16")
        for form in (None, "int8")
    ]
    assert len(set(made)) == len(made)


def test_options_that_a_divided_model_has_not_are_refused() -> None:
    given: dict[str, Any] = {"--device cuda": False, "--compiler": "nimble"}
    refuse_divided(given, tensor_parallel=1, pipeline_parallel=1)
    with pytest.raises(InvalidInputError, match="without --compiler"):
        refuse_divided(given, tensor_parallel=1, pipeline_parallel=2)


def test_a_model_with_an_encoder_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
    config = transformers.T5Config(decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    vocab = {f"t{token_id}": token_id for token_id in range(99)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidInputError, match="an encoder beside its decoder runs in one process"):
        divide(tmp_path, tensor_parallel=2, pipeline_parallel=1, dtype="fp32")


def test_a_part_without_a_native_operator_is_refused(six_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "NativeShard", Mock(side_effect=LoweringError("a gate of another kind")))
    with pytest.raises(LoweringError, match="a gate of another kind"):
        loading.load_shard(six_layers, Placement(num_ranks=2))

"""The form of rows that ``auto`` means: by the file's table and what was asked, never by a batch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, get_args

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.backends.native.kept import Copies
from mlsys_orca.loading import rows
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.rows import LEAST_WEIGHTS, Activations, choose_rows, count_coded
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import Placement

Make = Callable[..., Path]
Q = gguf.GGMLQuantizationType
FORMS = st.sampled_from([None, *get_args(Activations)])
DTYPES = st.sampled_from([None, "bf16", "bfloat16", "fp32", "float32"])


@given(asked=FORMS, num_coded=st.integers(0, 10**10), dtype=DTYPES, is_amx=st.booleans())
def test_the_rule(asked: Any, num_coded: int, dtype: str | None, is_amx: bool) -> None:
    found = choose_rows(asked, num_coded=num_coded, dtype=dtype, is_amx=is_amx)
    is_large = num_coded >= LEAST_WEIGHTS and not is_amx and dtype not in ("fp32", "float32")
    assert found.form == (asked if asked in ("int8", "float") else "int8" if is_large else "float")
    assert found.why.startswith("as asked" if asked in ("int8", "float") else "auto: ")


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "layers", "kv", "form"),
    [
        ("SmolLM2-135M", 576, 1536, 30, 192, "float"),
        ("SmolLM2-360M", 960, 2560, 32, 320, "float"),
        ("Qwen2.5-0.5B", 896, 4864, 24, 128, "float"),
        ("TinyLlama-1.1B", 2048, 5632, 22, 256, "int8"),
        ("Llama-3.2-3B", 3072, 8192, 28, 1024, "int8"),
        ("Llama-3.1-8B", 4096, 14336, 32, 1024, "int8"),
    ],
)
def test_shapes_that_people_run(name: str, hidden: int, inner: int, layers: int, kv: int, form: str) -> None:
    in_layers = layers * hidden * (2 * hidden + 2 * kv + 3 * inner)
    assert choose_rows("auto", num_coded=in_layers).form == form, name


def test_what_is_counted(make_gguf: Make, weights: dict[str, Any]) -> None:
    in_layers = {name: prod(each.shape) for name, each in weights.items() if each.ndim == 2 and ".weight" in name}
    tables = sum(count for name, count in in_layers.items() if not name.startswith("blk."))
    expected = sum(in_layers.values()) - tables
    assert tables > 0
    for kind, count in ((Q.Q4_0, expected), (Q.Q8_0, expected), (Q.F16, 0)):
        file = GgufFile(make_gguf(kind=kind))
        assert count_coded(file, None) == count_coded(file, "packed") == count
        assert count_coded(file, "int8") == count_coded(file, "int4") == expected


def test_auto_is_the_same_wherever_a_model_is_loaded(
    make_gguf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, from a copy or a part: one form, of the model alone."""
    monkeypatch.setattr(rows, "_has_amx", lambda: False)
    path, copies = make_gguf(kind=Q.Q4_0), Copies(tmp_path / "copies", 1 << 30)
    monkeypatch.setattr("mlsys_orca.backends.native.kept._LEAST_NBYTES", 0)

    def forms(dtype: str | None) -> set[str]:
        options: dict[str, Any] = {"dtype": dtype, "backend": "native"}
        found = set()
        for _ in range(2):  # the second one from the copy
            loaded = load_model(path, copies=copies, **options)
            assert isinstance(loaded.model, NativeDecoder)
            assert loaded.rows is not None
            found |= {loaded.rows.form, loaded.model.activations}
            assert (loaded.model.num_integer_products > 0) == (loaded.rows.form == "int8")
        shard: Any = load_shard(path, Placement(stage=1, num_stages=2), dtype=dtype)
        return found | {shard._decoder.activations}

    assert forms("bf16") == {"float"}
    monkeypatch.setattr(rows, "LEAST_WEIGHTS", 1000)
    assert forms("bf16") == {"int8"}
    assert forms("fp32") == {"float"}


def test_torchs_operators_have_no_form(make_gguf: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LEAST_WEIGHTS", 1000)
    loaded = load_model(make_gguf(kind=Q.Q4_0), dtype="bf16", backend="torch")
    assert loaded.rows is None
    assert loaded.model.dtype == torch.bfloat16

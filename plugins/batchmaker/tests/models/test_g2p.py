"""g2p-en against the recurrence of its own package: GRU with gates r, z, n, embedding, argmax, at most 20 phonemes.

The package's module cannot be imported without nltk and its data, so its NumPy recurrence is written out here from the
equations and its checkpoint, one word at a time.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.g2p import PHONEMES, encode, g2p_model
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.models import resolve_model

try:
    CHECKPOINT: Path | None = resolve_model("g2p-en", settings().cache_dir)
except MissingDependencyError:
    CHECKPOINT = None
needs_g2p = pytest.mark.skipif(CHECKPOINT is None, reason="the wheel g2p-en is not installed")


def words(count: int) -> list[str]:
    """Words of this repository's documents and sources, then made-up ones."""
    found: dict[str, None] = {}
    root = Path(__file__).parents[4]
    for path in sorted([*root.glob("docs/**/*.md"), *root.glob("*.md"), *root.glob("packages/core/src/**/*.py")]):
        for word in re.findall(r"[a-z]{2,}", path.read_text().lower()):
            found[word] = None
    rng = np.random.default_rng(0)
    while len(found) < count:
        found["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(1, 15)))] = None
    return list(found)[:count]


def gru(x: np.ndarray, h: np.ndarray, weights: dict[str, np.ndarray], side: str) -> np.ndarray:
    from_x = x @ weights[f"{side}_w_ih"].T + weights[f"{side}_b_ih"]
    from_h = h @ weights[f"{side}_w_hh"].T + weights[f"{side}_b_hh"]
    size = h.shape[1]
    gates = 1 / (1 + np.exp(-(from_x[:, : 2 * size] + from_h[:, : 2 * size])))
    r, z = gates[:, :size], gates[:, size:]
    n = np.tanh(from_x[:, 2 * size :] + r * from_h[:, 2 * size :])
    return (1 - z) * n + z * h


def predict(word: str, weights: dict[str, np.ndarray]) -> list[str]:
    h = np.zeros((1, weights["enc_w_hh"].shape[1]), dtype=np.float32)
    for letter in encode(word).tolist():
        h = gru(weights["enc_emb"][[letter]], h, weights, "enc")
    x, phonemes = weights["dec_emb"][[2]], []
    for _ in range(20):
        h = gru(x, h, weights, "dec")
        best = int((h @ weights["fc_w"].T + weights["fc_b"]).argmax())
        if best == 3:
            break
        phonemes.append(PHONEMES[best])
        x = weights["dec_emb"][[best]]
    return phonemes


def test_the_table_of_phonemes():
    assert len(PHONEMES) == 74
    assert PHONEMES[:6] == ("<pad>", "<unk>", "<s>", "</s>", "AA0", "AA1")
    assert PHONEMES[-7:] == ("UW0", "UW1", "UW2", "V", "W", "Y", "Z", "ZH")[1:]


@pytest.mark.model
@needs_g2p
def test_the_table_of_phonemes_is_the_package_s():
    assert CHECKPOINT is not None
    tree = ast.parse((CHECKPOINT.parent / "g2p.py").read_text())
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List) and len(node.elts) in (4, 70)]
    marks, names = sorted(([each.value for each in node.elts] for node in lists if marks_or_names(node)), key=len)
    assert list(PHONEMES) == marks + names


def marks_or_names(node: ast.List) -> bool:
    return all(isinstance(each, ast.Constant) for each in node.elts) and node.elts[0].value in ("<pad>", "AA0")


@pytest.mark.model
@needs_g2p
@pytest.mark.parametrize("compiler", ["eager", "auto"])
def test_2000_words_have_the_phonemes_of_the_package(compiler: str):
    assert CHECKPOINT is not None
    with np.load(CHECKPOINT) as arrays:
        weights = {key: arrays[key] for key in arrays.files}
    model = g2p_model(CHECKPOINT)
    asked = words(2000)
    assert len(asked) == 2000
    with Engine(model, EngineConfig(compiler=compiler)) as engine:
        futures = [engine.submit({"word": np.array([word.encode()], dtype=object)}) for word in asked]
        answers = [[p.decode() for p in future.result().outputs["phonemes"]] for future in futures]
        assert engine.counters.effective_batch_size > 8
    expected = [predict(word, weights) for word in asked]
    assert answers == expected


@pytest.mark.model
@needs_g2p
@pytest.mark.parametrize("word", [b"", b"x" * 101, b"\xff"], ids=["empty", "long", "bytes"])
def test_bad_words(word: bytes):
    assert CHECKPOINT is not None
    with pytest.raises(InvalidInputError, match="word"):
        g2p_model(CHECKPOINT).unfold({"word": np.array([word], dtype=object)})


def test_another_file_is_refused(tmp_path: Path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(InvalidInputError, match="is not g2p-en's"):
        g2p_model(tmp_path / "other.npz")

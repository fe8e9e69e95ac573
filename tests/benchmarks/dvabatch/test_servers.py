"""Servers over HTTP: what is asked of them, and that one that gives other vectors ends the run."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_bench.dvabatch import over_http
from mlsys_core.bench import BenchContext
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.loop.queue import ServeRequest
from mlsys_core.models import resolve_model
from mlsys_encoders.models.bert_folder import load_bert
from rich.console import Console

QUICK = BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1)


def test_servers_are_named() -> None:
    with pytest.raises(InvalidInputError, match="name running servers"):
        over_http.run(QUICK)


def test_texts_have_the_lengths_of_their_workload() -> None:
    assert len(over_http.texts_like("RTE", 5)) == 5


PEER = Path(__file__).parents[3] / "benchmarks" / "peers" / "sentence_model.py"


@pytest.mark.model
def test_the_peers_encoder_gives_dvabatchs_vectors():
    tokenizers = pytest.importorskip("tokenizers")
    try:
        folder = resolve_model("all-minilm-l6-v2", settings().cache_dir)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    try:
        texts = ["the train is late", "when", "and who will wait here again"]
        vectors = runpy.run_path(str(PEER))["embedder"](folder)(texts)
        packed = load_bert(folder, num_stages=1).with_form(is_packed=True)
        encoded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        encoded.no_padding()
        ids = [torch.tensor(each.ids) for each in encoded.encode_batch(texts)]
        with torch.inference_mode():
            values = packed.run(0, packed.collate([ServeRequest(str(n), each) for n, each in enumerate(ids)], 1))
            expected = np.stack([np.asarray(vector) for vector in packed.results(values)])
    finally:
        torch.set_num_threads(threads)
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)

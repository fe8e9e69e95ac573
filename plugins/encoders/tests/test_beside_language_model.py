"""An encoder beside Orca's server by the option ``--encoder``; ``mlsys orca embed`` without a server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import installed_plugins
from mlsys_encoders.extension import EncoderOptions
from mlsys_serving.extensions import Extensions, Served
from mlsys_serving.http import BackgroundServer, HttpConfig, create_app

from .test_texts import LINES, logits, vector
from .texts import write_folder


def server(folder: Path | None) -> BackgroundServer:
    """Return a server of the system "orca", whose own routes do not matter here."""
    options = EncoderOptions(encoder=None if folder is None else str(folder))
    extensions = Extensions.of("orca", installed_plugins().registry, encoder=options)
    return BackgroundServer(create_app(HttpConfig(), served=Served(system="orca", extensions=extensions)))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path / "cache"))


def test_an_encoder_is_served_beside_a_language_model(tmp_path: Path) -> None:
    model = write_folder(folder := tmp_path / "small")
    with server(folder) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
        floats = client.embeddings.create(model="small", input=LINES, encoding_format="float").data
        packed = client.embeddings.create(input=LINES, model="small").data  # asked for as base64
        for each, other, line in zip(floats, packed, LINES, strict=True):
            np.testing.assert_allclose(each.embedding, vector(model, folder, line), atol=1e-5)
            np.testing.assert_allclose(other.embedding, each.embedding, atol=1e-6)
        with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
            client.embeddings.create(model="other", input="sun")
        with pytest.raises(openai.APIStatusError, match="truncate"):
            client.embeddings.create(model="small", input="cat " * 20)


def test_a_cross_encoder_ranks_and_has_no_vectors(tmp_path: Path) -> None:
    model = write_folder(folder := tmp_path / "ranker", num_labels=1)
    with server(folder) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
        body = {"query": LINES[1], "documents": LINES}
        results = client.post("/rerank", cast_to=object, body=body)["results"]  # type: ignore[index]
        for each in results:
            expected = logits(model, folder, LINES[1], LINES[each["index"]]).sigmoid()
            assert each["relevance_score"] == pytest.approx(float(expected), abs=1e-5)
        assert httpx.post(f"{running.url}/rerank", json=body).json()["results"] == results
        scores = httpx.post(f"{running.url}/score", json={"text_1": LINES[1], "text_2": LINES}).json()["data"]
        assert {each["index"]: each["score"] for each in scores} == {
            each["index"]: pytest.approx(each["relevance_score"], abs=1e-5) for each in results
        }
        with pytest.raises(openai.APIStatusError, match="is a classifier, which has no vectors"):
            client.embeddings.create(model="ranker", input="sun")


def test_there_are_no_routes_without_the_option_and_no_start_with_a_wrong_name(tmp_path: Path) -> None:
    with server(None) as running, pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x").embeddings.create(model="small", input="sun")
    with pytest.raises(InvalidInputError, match="no-such-encoder"):
        EncoderOptions(encoder="no-such-encoder").check(has_instances=False)


def test_lines_are_embedded_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_folder(folder := tmp_path / "small")
    (tmp_path / "lines.txt").write_text("\n".join([*LINES, "", LINES[0]]) + "\n")
    assert run(["orca", "embed", str(tmp_path / "lines.txt"), "--model", str(folder)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["text"] for each in found] == [*LINES, LINES[0]]
    for each in found:
        np.testing.assert_allclose(each["embedding"], vector(model, folder, each["text"]), atol=1e-5)
    assert run(["orca", "embed", str(tmp_path / "none.txt")]) == 2
    assert "there is no file" in capsys.readouterr().err

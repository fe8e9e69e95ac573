"""Texts over OpenAI's, Cohere's and text-embeddings-inference's routes: what transformers gives for the same tokens."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_encoders.serve.tei_fields import TeiDecodeRequest, TeiEmbedRequest, TeiPredictRequest, TeiTokenizeRequest
from mlsys_encoders.serve.text_bodies import EmbeddingRequest, RerankRequest
from mlsys_serving.http.unions import without_branches
from pydantic import ValidationError
from tokenizers import Tokenizer

from .texts import WORDS, serving, write_folder

LINES = ["The cat sat on the mat.", "A dog ran home", "sun", "red moon : blue sun is the home"]
PROMPTS = {"config_sentence_transformers.json": {"prompts": {"query": "query : ", "plain": ""}}}
LONG = "cat " * 20


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Path]]:
    folder = tmp_path_factory.mktemp("texts") / "small"
    model = write_folder(folder, files=PROMPTS)
    with serving(folder) as url:
        yield url, model, folder


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Path]]:
    folder = tmp_path_factory.mktemp("texts") / "ranker"
    model = write_folder(folder, num_labels=1)
    with serving(folder) as url:
        yield url, model, folder


@pytest.fixture(scope="module")
def moods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Path]]:
    folder = tmp_path_factory.mktemp("texts") / "moods"
    model = write_folder(folder, num_labels=3)
    with serving(folder) as url:
        yield url, model, folder


def vector(model: Any, folder: Path, text: str, *, most: int | None = None) -> np.ndarray[Any, Any]:
    """The mean of transformers' last states, of length 1."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if most is not None:
        tokenizer.enable_truncation(most)
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        mean = model(ids).last_hidden_state[0].mean(0)
    return np.asarray(mean / mean.norm())


def logits(model: Any, folder: Path, *texts: str) -> torch.Tensor:
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*texts)
    with torch.no_grad():
        found: torch.Tensor = model(
            torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
        ).logits[0]  # fmt: skip
    return found


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected), rtol=0, atol=1e-5)


def test_the_openai_client_gets_vectors(encoder: tuple[str, Any, Path]):
    url, model, folder = encoder
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    answer = client.embeddings.create(model="small", input=LINES)  # base64 by default
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    close([each.embedding for each in answer.data], [vector(model, folder, text) for text in LINES])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 6 + 3 + 10
    floats = client.embeddings.create(model="small", input=LINES[0], encoding_format="float")
    close(floats.data[0].embedding, vector(model, folder, LINES[0]))
    ids = client.embeddings.create(model="small", input=[[2, 6, 3], [2, 7, 8, 3]])
    close(ids.data[0].embedding, vector(model, folder, "cat"))
    half = client.embeddings.create(model="small", input="sun", dimensions=8)
    first = vector(model, folder, "sun")[:8]
    close(half.data[0].embedding, first / np.linalg.norm(first))
    assert [each.id for each in client.models.list()] == ["small"]


def test_openai_errors_name_what_to_do(encoder: tuple[str, Any, Path]):
    url, model, folder = encoder
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIStatusError, match="a text has 22 tokens, and the model takes 16: split it") as raised:
        client.embeddings.create(model="small", input=["sun", LONG])
    assert raised.value.status_code == 413
    assert raised.value.body == {
        "type": "invalid_request_error",
        "code": "input_too_long",
        "message": raised.value.body["message"],  # type: ignore[index]
        "param": "truncate",
        "request_id": raised.value.body["request_id"],  # type: ignore[index]
    }
    cut = client.embeddings.create(model="small", input=LONG, extra_body={"truncate": True})
    close(cut.data[0].embedding, vector(model, folder, LONG, most=16))
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.embeddings.create(model="other", input="sun")
    with pytest.raises(openai.BadRequestError, match="dimensions is 25; the vectors of 'small' have 24"):
        client.embeddings.create(model="small", input="sun", dimensions=25)
    with pytest.raises(openai.BadRequestError, match="vocabulary has 0 to"):
        client.embeddings.create(model="small", input=[[2, 99, 3]])
    with pytest.raises(openai.BadRequestError, match="there is no such field"):
        client.embeddings.create(model="small", input="sun", extra_body={"pooling": "cls"})
    with pytest.raises(openai.BadRequestError, match="this model's prompts are: query, plain"):
        client.embeddings.create(model="small", input="sun", extra_body={"prompt_name": "passage"})


def test_prompts_go_before_texts(encoder: tuple[str, Any, Path]):
    url, model, folder = encoder
    asked = post(url, "/v1/embeddings", {"input": "the cat", "prompt_name": "query"}).json()
    close(asked["data"][0]["embedding"], vector(model, folder, "query : the cat"))
    plain = post(url, "/embed", {"inputs": "the cat", "prompt_name": "plain"}).json()
    close(plain[0], vector(model, folder, "the cat"))


def test_a_default_prompt_is_for_texts_without_one(tmp_path: Path):
    prompts = {"prompts": {"query": "query : "}, "default_prompt_name": "query"}
    model = write_folder(tmp_path / "prompted", files={"config_sentence_transformers.json": prompts})
    with serving(tmp_path / "prompted") as url:
        got = post(url, "/embed", {"inputs": ["the cat", [2, 6, 3]]}).json()
    close(got[0], vector(model, tmp_path / "prompted", "query : the cat"))
    close(got[1], vector(model, tmp_path / "prompted", "cat"))


def test_tei_embeds(encoder: tuple[str, Any, Path]):
    url, model, folder = encoder
    close(post(url, "/embed", {"inputs": LINES}).json(), [vector(model, folder, text) for text in LINES])
    long = post(url, "/embed", {"inputs": LONG})
    assert long.status_code == 413
    assert long.json()["error_type"] == "Validation"
    assert "send truncate: true" in long.json()["error"]
    tail = post(url, "/embed", {"inputs": f"sun {LONG}", "truncate": True, "truncation_direction": "Left"}).json()
    close(tail[0], vector(model, folder, LONG, most=16))
    assert post(url, "/embed", {"inputs": "sun", "normalize": False}).status_code == 400
    assert post(url, "/embed", {"inputs": ""}).json()["error_type"] == "Validation"
    assert post(url, "/embed_all", {"inputs": "sun"}).status_code == 501
    wrong = post(url, "/predict", {"inputs": "sun"})
    assert (wrong.status_code, wrong.json()["error_type"]) == (424, "Backend")
    info = httpx.get(f"{url}/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["model_id"], info["max_input_length"]) == ("small", 16)


def test_tei_tells_tokens(encoder: tuple[str, Any, Path]):
    url, _, _ = encoder
    assert post(url, "/tokenize", {"inputs": "Dog ran"}).json() == [
        [
            {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": 7, "text": "Dog", "special": False, "start": 0, "stop": 3},
            {"id": 9, "text": "ran", "special": False, "start": 4, "stop": 7},
            {"id": 3, "text": "[SEP]", "special": True, "start": None, "stop": None},
        ]
    ]
    bare = post(url, "/tokenize", {"inputs": ["sun"], "add_special_tokens": False, "prompt_name": "query"}).json()
    assert [token["text"] for token in bare[0]] == ["query", ":", "sun"]
    assert post(url, "/decode", {"ids": [2, 7, 9, 3]}).json() == ["dog ran"]


def test_documents_are_ranked_by_cosines(encoder: tuple[str, Any, Path]):
    url, model, folder = encoder
    source = vector(model, folder, "the cat")
    cosines = [float(vector(model, folder, text) @ source) for text in LINES]
    order = sorted(range(4), key=lambda index: -cosines[index])
    answer = post(url, "/v1/rerank", {"model": "small", "query": "the cat", "documents": LINES, "top_n": 3}).json()
    assert [each["index"] for each in answer["results"]] == order[:3]
    assert answer["results"][0]["document"] == {"text": LINES[order[0]]}
    close([each["relevance_score"] for each in answer["results"]], [cosines[index] for index in order[:3]])
    pairs = post(url, "/score", {"text_1": ["the cat"] * 4, "text_2": LINES}).json()["data"]
    close([each["score"] for each in pairs], cosines)
    body = {"inputs": {"source_sentence": "the cat", "sentences": LINES}}
    close(post(url, "/similarity", body).json(), cosines)


def test_cross_encoders_rank(ranker: tuple[str, Any, Path]):
    url, model, folder = ranker
    raw = [float(logits(model, folder, "the cat", text)) for text in LINES]
    order = sorted(range(4), key=lambda index: -raw[index])
    sure = [1 / (1 + np.exp(-raw[index])) for index in order]
    documents = [LINES[0], {"text": LINES[1]}, *LINES[2:]]
    for path in ("/v1/rerank", "/v2/rerank"):
        answer = post(url, path, {"query": "the cat", "documents": documents, "return_documents": False}).json()
        assert [each["index"] for each in answer["results"]] == order
        assert "document" not in answer["results"][0]
        close([each["relevance_score"] for each in answer["results"]], sure)
    for path in ("/v1/score", "/score"):
        for first in ("the cat", ["the cat"], ["the cat"] * 4):
            data = post(url, path, {"text_1": first, "text_2": LINES}).json()["data"]
            assert [each["index"] for each in data] == [0, 1, 2, 3]
            close([each["score"] for each in data], [1 / (1 + np.exp(-each)) for each in raw])
        refused = post(url, path, {"text_1": ["the cat"] * 3, "text_2": LINES})
        assert refused.status_code == 400
        assert "'text_1' is one text, or as many as" in refused.json()["error"]["message"]
    tei = post(url, "/rerank", {"query": "the cat", "texts": LINES, "return_text": True}).json()
    assert [each["text"] for each in tei] == [LINES[index] for index in order]
    close([each["score"] for each in tei], sure)
    raws = post(url, "/rerank", {"query": "the cat", "texts": LINES, "raw_scores": True}).json()
    close([each["score"] for each in raws], [raw[index] for index in order])
    assert post(url, "/rerank", {"query": "the cat", "texts": [LONG]}).status_code == 413
    assert post(url, "/rerank", {"query": "the cat", "texts": [LONG], "truncate": True}).status_code == 200
    refused = post(url, "/v1/embeddings", {"input": "sun"})
    assert refused.status_code == 424
    assert refused.json()["error"]["code"] == "wrong_model"
    assert "reranker" in httpx.get(f"{url}/info").json()["model_type"]


def test_classifiers_predict(moods: tuple[str, Any, Path]):
    url, model, folder = moods
    pairs = [("the cat",), ("the cat", "sat home"), ("sun",)]
    expected = [logits(model, folder, *pair).softmax(-1) for pair in pairs]
    batch = post(url, "/predict", {"inputs": [list(pair) for pair in pairs]}).json()
    for got, scores in zip(batch, expected, strict=True):
        assert [each["score"] for each in got] == sorted((each["score"] for each in got), reverse=True)
        by_label = {each["label"]: each["score"] for each in got}
        close([by_label[f"LABEL_{number}"] for number in range(3)], scores)
    single = post(url, "/predict", {"inputs": "the cat"}).json()
    close([each["score"] for each in single], [each["score"] for each in batch[0]])
    together = post(url, "/predict", {"inputs": ["the cat", "sat home"], "raw_scores": True}).json()
    close(sorted(each["score"] for each in together), logits(model, folder, *pairs[1]).sort().values)
    assert post(url, "/predict", {"inputs": ["a", "b", "c"]}).status_code == 400
    assert "ranks nothing: use /predict" in post(url, "/rerank", {"query": "a", "texts": ["b"]}).json()["error"]
    texts = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]} for name, text in
             (("text", "the cat"), ("text_pair", "sat home"))]  # fmt: skip
    oip = post(url, "/v2/models/moods/infer", {"inputs": texts}).json()
    assert oip["outputs"][0]["name"] == "logits"
    close(oip["outputs"][0]["data"], logits(model, folder, *pairs[1]))


@pytest.mark.parametrize("num_labels", [0, 1])
def test_vectors_and_scores_that_are_not_finite_are_refused(tmp_path: Path, num_labels: int):
    model = write_folder(tmp_path / "net", num_labels=num_labels)
    with torch.no_grad():
        model.get_input_embeddings().weight[WORDS.index("moon")] = torch.nan
    model.save_pretrained(tmp_path / "net")
    bodies: dict[str, Any] = {
        "/v1/rerank": {"model": "net", "query": "the cat", "documents": ["sun", "moon"]},
        "/rerank": {"query": "the cat", "texts": ["sun", "moon"]},
    }
    if num_labels:
        bodies["/predict"] = {"inputs": [["sun"], ["moon"]]}
    else:
        bodies["/v1/embeddings"] = {"model": "net", "input": ["sun", "moon"]}
        bodies["/embed"] = {"inputs": ["sun", "moon"]}
        bodies["/similarity"] = {"inputs": {"source_sentence": "sun", "sentences": ["moon"]}}
    with serving(tmp_path / "net") as url:
        for path, body in bodies.items():
            refused = post(url, path, body)
            assert refused.status_code == 400, path
            assert "not finite (NaN or infinity); check its input" in refused.text, path
            plain = json.loads(json.dumps(body).replace("moon", "cat"))
            assert post(url, path, plain).status_code == 200, path


def test_several_encoders_are_named_by_requests(tmp_path: Path):
    for name in ("one", "two"):
        write_folder(tmp_path / name)
    with serving(tmp_path / "one", tmp_path / "two") as url:
        refused = post(url, "/embed", {"inputs": "sun"})
        assert refused.status_code == 400
        assert "has 2 encoders (one, two): name one" in refused.json()["error"]
        answer = post(url, "/v1/embeddings", {"model": "two", "input": ["sun"] * 40, "encoding_format": "base64"})
        vectors = [base64.b64decode(each["embedding"]) for each in answer.json()["data"]]
    assert len(vectors) == 40
    assert len(set(vectors)) <= 4  # all alike but for rounding between batch sizes


def test_many_texts_are_encoded_while_others_run(encoder: tuple[str, Any, Path]):
    url, model, folder = encoder
    expected = [vector(model, folder, text) for text in LINES]
    answer = post(url, "/v1/embeddings", {"input": LINES * 50}).json()
    close([each["embedding"] for each in answer["data"]], expected * 50)
    assert answer["usage"]["prompt_tokens"] == 50 * (9 + 6 + 3 + 10)
    refused = post(url, "/v1/embeddings", {"input": [*LINES * 50, "cat " * 500]})
    assert refused.status_code == 413
    again = post(url, "/v1/embeddings", {"input": LINES}).json()
    close([each["embedding"] for each in again["data"]], expected)


@pytest.mark.parametrize("side", ["left", "Left", "right", "Right"])
def test_both_spellings_of_a_side_are_taken(side):
    body = TeiEmbedRequest.model_validate({"inputs": "a", "truncation_direction": side})
    assert body.truncation_direction == side.capitalize()


_BAD_ITEMS = st.sampled_from(["", [], None, True, 5, 0.5, -1, 2**31, {}, {"text": ""}, ["a", ""], [[1], []], ["a", 1]])
_UNIONS = [
    (EmbeddingRequest, {}, "input"),
    (RerankRequest, {"query": "a"}, "documents"),
    (TeiEmbedRequest, {}, "inputs"),
    (TeiPredictRequest, {}, "inputs"),
    (TeiTokenizeRequest, {}, "inputs"),
    (TeiDecodeRequest, {}, "ids"),
]


@given(st.sampled_from(_UNIONS), _BAD_ITEMS | st.lists(_BAD_ITEMS, max_size=4) | st.just(["a"] * 3000))
def test_a_field_that_fits_no_branch_is_refused_under_its_own_path(union, value):
    model, rest, field = union
    body = {**rest, field: value}
    try:
        model.model_validate(body)
    except ValidationError as error:
        (told,) = without_branches([{**each, "loc": ("body", *each["loc"])} for each in error.errors()], body)
        assert told["loc"][:2] == ("body", field)
        place: Any = body
        for part in told["loc"][1 : -1 if told["type"] == "missing" else None]:
            place = place[part]
        assert re.match("(Field required|(Input|String|List) should (be|have) [^_\\[]+)$", told["msg"])

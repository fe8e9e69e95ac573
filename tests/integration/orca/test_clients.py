"""Clients that ``make test-peers`` installs: LangChain, Anthropic's, and the evaluation harness on a task of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlsys_orca.loading.loaded import LoadedModel

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"
FACTS = [
    ("The capital of France is", [" Paris", " Oslo"], 0),
    ("The sky is", [" wooden", " blue"], 1),
    ("Cats and", [" dogs", " logarithms"], 0),
    ("One, two, three,", [" seventy", " four"], 1),
]


def test_langchain_asks_streams_and_parses(url: str, tool_url: str, ask: Any) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    from pydantic import BaseModel

    options = {"model": MODEL, "api_key": "none", "temperature": 0, "max_tokens": 24, "max_retries": 0}
    chat = langchain.ChatOpenAI(base_url=f"{url}/v1", **options)
    expected = ask().choices[0].message.content
    assert chat.invoke("Why do plants need sunlight?").content == expected
    assert "".join(chunk.content for chunk in chat.stream("Why do plants need sunlight?")) == expected

    class City(BaseModel):
        """A city."""

        name: str
        is_capital: bool

    shaped = chat.with_structured_output(City, method="json_schema").invoke("Rome?")
    assert isinstance(shaped, City)
    with_tools = langchain.ChatOpenAI(base_url=f"{tool_url}/v1", **options | {"max_tokens": 80})
    answer = with_tools.bind_tools([City], tool_choice="City").invoke("Rome?")
    assert answer.tool_calls[0]["name"] == "City"


def test_anthropics_client_asks_streams_and_is_refused(url: str, ask: Any) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    user = [{"role": "user", "content": "Why do plants need sunlight?"}]
    options = {"model": MODEL, "messages": user, "max_tokens": 24, "extra_body": {"temperature": 0}}
    expected = ask()
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**options)
        assert whole.content[0].text == expected.choices[0].message.content
        assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", MODEL, "max_tokens")
        assert whole.usage.output_tokens == 24
        assert whole.usage.input_tokens == expected.usage.prompt_tokens
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().usage == whole.usage
        word = whole.content[0].text.split()[1]
        stopped = client.messages.create(**options, stop_sequences=[word])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        assert word not in stopped.content[0].text
        briefed = client.messages.create(**options, system=[{"type": "text", "text": "Answer in French."}])
        assert briefed.usage.input_tokens != whole.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError, match=r"the model .none. does not exist here"):
            client.messages.create(**options | {"model": "none"})
        tool = {"name": "f", "description": "", "input_schema": {"type": "object", "properties": {}}}
        with pytest.raises(anthropic.BadRequestError, match=r"invalid_request_error.*--chat-template"):
            client.messages.create(**options, tools=[tool])
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
            client.messages.create(**options | {"messages": [{"role": "user", "content": [picture]}]})


def test_lm_eval_scores_a_tiny_task(url: str, loaded: LoadedModel, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
    transformers = pytest.importorskip("transformers")
    from lm_eval.tasks import TaskManager

    (tmp_path / "facts.jsonl").write_text(
        "".join(json.dumps({"text": text, "choices": choices, "label": label}) + "\n" for text, choices, label in FACTS)
    )
    (tmp_path / "facts.yaml").write_text(
        "task: facts\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/facts.jsonl}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{label}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    (tmp_path / "tokenizer.json").write_text(loaded.tokenizer.to_json())
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    fast.eos_token = "<|im_end|>"
    fast.save_pretrained(tmp_path / "tokenizer")
    arguments = (
        f"model={MODEL},base_url={url}/v1/completions,tokenizer={tmp_path}/tokenizer,max_length=512,batch_size=4"
    )
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["facts"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["results"]["facts"]["acc,none"] == 1.0

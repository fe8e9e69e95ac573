"""The suite ``orca-peers``: its pure parts, child processes of an engine made up here, and our own case."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlsys_bench.orca.peers import models, suite
from mlsys_bench.orca.peers.cases import CASES, OURS, Job, PeerCase
from mlsys_bench.orca.peers.engines import child
from mlsys_bench.orca.peers.report import Run, problems_of, rows_of, score_of
from mlsys_bench.orca.peers.runners import NotReadyError, result_of, running
from mlsys_bench.orca.peers.suite import best_of
from mlsys_bench.orca.peers.traffic import make_traffic
from mlsys_bench.workload.results import LoadResult, RequestRecord
from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.cli.bench import find_suite
from mlsys_core.errors import InvalidInputError
from rich.console import Console


def records(num: int, *, tokens: int = 4, seconds: float = 1.0, **changes: Any) -> LoadResult:
    one = RequestRecord(
        index=0,
        scheduled_s=0.0,
        sent_s=0.0,
        done_s=seconds,
        token_s=tuple(seconds * (i + 1) / tokens for i in range(tokens)),
        num_input_tokens=3,
        num_output_tokens=tokens,
        num_planned_tokens=tokens,
        output=" a b",
    )
    items = tuple(dataclasses.replace(one, index=index, **changes) for index in range(num))
    return LoadResult(name="x", records=items, num_planned=num, max_connections=num)


def test_traffic_is_seeded_and_the_same_for_text_and_ids() -> None:
    traffic = make_traffic("llama", 2.0, num_requests=5, seed=3)
    assert traffic == make_traffic("llama", 2.0, num_requests=5, seed=3)
    assert traffic.prompts != make_traffic("llama", 2.0, num_requests=5, seed=4).prompts
    faster = make_traffic("llama", 4.0, num_requests=5, seed=3)
    assert faster.prompts == traffic.prompts
    assert faster.trace.items[-1].arrival_s < traffic.trace.items[-1].arrival_s

    ids = traffic.over_http({"temperature": 0})
    for item, sent, prompt in zip(ids, traffic.in_process(), traffic.prompts, strict=True):
        assert item.extra == {"temperature": 0, "prompt": list(prompt)}
        assert len(prompt) == item.num_input_tokens
        assert min(prompt) >= models.NUM_SILENT_TOKENS
        assert traffic.text(prompt).split() == [traffic.words[token].strip() for token in prompt]
        assert sent == {"arrival_s": item.arrival_s, "prompt": list(prompt), "num_tokens": item.num_output_tokens}


def plan(**changes: Any) -> suite.Plan:
    options: dict[str, Any] = {"model": "llama", "dtype": "fp32", "threads": 1, "rates": (), "requests": 20}
    options |= {"tuning_requests": 4, "rounds": 1, "in_process": False, "loaded": False}
    return suite.Plan(**options | changes)


def test_each_rate_has_prompts_of_its_own() -> None:
    sent = [prompt for traffic in plan(rates=(1.0, 2.0, 4.0)).traffics() for prompt in traffic.prompts]
    assert len({prompt[:16] for prompt in sent}) == len(sent) == 60, "the first block of each is met for the first time"


def test_text_of_words_is_split_into_the_same_tokens() -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE

    tokens, merges = models.vocabulary(32000)
    assert len(set(tokens)) == 32000
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    traffic = make_traffic("llama", None, num_requests=8, seed=0)
    assert [tuple(tokenizer.encode(traffic.text(prompt)).ids) for prompt in traffic.prompts] == list(traffic.prompts)


def test_runs_with_other_token_counts_are_no_figures() -> None:
    assert problems_of(records(2), [3, 3]) == ()
    assert problems_of(records(2), [3, 4]) == ("1 prompts of another length than asked for",)
    assert problems_of(records(2, num_planned_tokens=5), [3, 3]) == ("2 answers of another length than asked for",)
    failed = records(2, error="http_500")
    assert problems_of(failed, [3, 3]) == ("2 failed: http_500",)
    run = Run("peer", "offline", failed, 0.0, problems_of(failed, [3, 3]))
    assert score_of(run, is_offline=True) == 0.0


def test_tuning_takes_throughput_offline_and_latency_online() -> None:
    many, quick = (Run("p", "t", result, 0.0, ()) for result in (records(8, seconds=2.0), records(2)))
    for is_offline, better, worse in ((True, many, quick), (False, quick, many)):
        scores = [score_of(run, is_offline=is_offline) for run in (worse, better)]
        assert scores[0] < scores[1]
        assert best_of((0, 1), scores.__getitem__)[0] == 1
    assert best_of((0, 1), lambda _: 0.0)[0] is None, "no settings gave figures"


def test_rows_have_medians_agreement_and_the_largest_share_of_others() -> None:
    runs = [
        Run("peer", "offline", records(2, seconds=1.0, output=" c"), 0.25, ()),
        Run("peer", "2 req/s", records(2), 0.0, ()),
        Run("ours", "offline", records(2, seconds=2.0), 0.0, ()),
        Run("peer", "offline", records(2, seconds=4.0), 0.5, ("1 failed: timeout",)),
    ]
    rows = rows_of(runs, ours="ours")
    assert [(row.traffic, row.case) for row in rows] == [("offline", "peer"), ("offline", "ours"), ("2 req/s", "peer")]
    assert rows[0].tokens_per_s == 5.0  # of 8 and 2 tokens per second
    assert [row.as_ours for row in rows] == ["0%", "100%", "-"]
    assert (rows[0].other_load, rows[0].problems) == ("50%", "1 failed: timeout")


def test_every_case_has_settings_to_choose_from_and_a_command() -> None:
    for dtype in ("fp32", "bf16"):
        job = Job("llama", dtype, 2, Path("/models"), Path("/peers"))
        for case in CASES:
            settings = case.settings(job)
            assert len(settings) >= 3
            assert len({json.dumps(each) for each in settings}) == len(settings)
            for each in settings:
                assert any("8001" in part for part in case.server(job, each, 8001))
                json.dumps(case.engine_options(job, each))
        named = {each.name: each.missing(job) for each in CASES}
        assert named.pop(OURS) is None
        assert all(reason and "benchmarks/peers/install.sh" in reason for reason in named.values())


class Echo:
    """An engine: one token of each request per step, the prompt's last one over and over."""

    def __init__(self) -> None:
        self.running: dict[int, list[int]] = {}  # key: token, tokens left
        self.most_at_once = 0

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        self.running[key] = [prompt[-1], num_tokens]

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        self.most_at_once = max(self.most_at_once, len(self.running))
        time.sleep(0.001)
        for state in self.running.values():
            state[1] -= 1
        events = [(key, [token]) for key, (token, _) in self.running.items()]
        self.running = {key: state for key, state in self.running.items() if state[1]}
        return events


def test_a_child_drives_its_engine_at_the_times_of_arrival() -> None:
    engine = Echo()
    requests = [{"arrival_s": when, "prompt": [7, index], "num_tokens": 3} for index, when in enumerate((0, 0, 0.05))]
    answers = child.run(engine, requests, first_key=10)
    assert engine.most_at_once == 2
    assert [answer["tokens"] for answer in answers] == [[index] * 3 for index in range(3)]
    assert all(answer["token_s"] == sorted(answer["token_s"]) for answer in answers)
    assert answers[2]["sent_s"] >= 0.05
    assert answers[2]["token_s"][0] > answers[2]["sent_s"]


def test_a_childs_report_becomes_a_result() -> None:
    traffic = make_traffic("llama", None, num_requests=2, seed=0)
    answers = [
        {"sent_s": 0.0, "token_s": [0.5] * item.num_output_tokens, "tokens": [300] * item.num_output_tokens}
        for item in traffic.trace
    ]
    result = result_of(traffic, answers)
    assert problems_of(result, [len(prompt) for prompt in traffic.prompts]) == ()
    assert result.records[0].output == traffic.words[300] * traffic.trace.items[0].num_output_tokens
    assert result.ttft is not None
    assert result.ttft.p50 == 0.5


FRONT = """
import sys
sys.path.insert(0, sys.argv[1])
from mlsys_bench.orca.peers.engines.http_front import serve
from test_peers import Echo
serve(Echo(), {index: f" w{index}" for index in range(400)}, int(sys.argv[2]))
"""


def test_the_http_front_streams_what_the_engine_gives(tmp_path: Path) -> None:
    echo = PeerCase(
        name="echo",
        environment=None,
        requirement="",
        settings=lambda job: [{}],
        server=lambda job, settings, port: ["-c", FRONT, str(Path(__file__).parent), str(port)],
        engine="none",
        engine_options=lambda job, settings: {},
        body={"temperature": 0},
    )
    job = Job("llama", "fp32", 1, tmp_path, tmp_path)
    traffic = make_traffic("llama", None, num_requests=6, seed=0)
    small = dataclasses.replace(traffic, prompts=tuple((1, 2, index) for index in range(6)))
    with running(echo, job, {}, is_in_process=False, log=tmp_path / "log") as runner:
        result = runner.run(small)
        again = runner.run(small)
    for run in (result, again):
        assert problems_of(run, [3] * 6) == ()
        for record in run.records:
            assert record.output == f" w{record.index}" * record.num_planned_tokens
            assert len(record.token_s) == record.num_planned_tokens


def test_a_case_that_ends_says_why(tmp_path: Path) -> None:
    (ours,) = (each for each in CASES if each.name == OURS)
    broken = dataclasses.replace(ours, server=lambda job, settings, port: ["-c", "raise SystemExit('no weights')"])
    job = Job("llama", "fp32", 1, tmp_path, tmp_path)
    with (
        pytest.raises(NotReadyError, match="no weights"),
        running(broken, job, {}, is_in_process=False, log=tmp_path / "log"),
    ):
        raise AssertionError("never reached")


def context_of(folder: Path) -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cases": ("mlsys orca", "vllm")},
            "no case is called 'vllm': there are mlsys orca, openvino-genai",
        ),
        ({"model": "gpt3"}, "model is llama or gpt2"),
        ({}, "python -m mlsys_bench.orca.peers.models"),
    ],
)
def test_options_are_refused_before_anything_runs(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        suite.run(context_of(tmp_path), models=str(tmp_path), **options)


@pytest.mark.slow
def test_our_case_runs_over_http_and_without_and_missing_peers_are_named(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=models.VOCABULARY_SIZE["llama"], tie_word_embeddings=True, eos_token_id=0, **sizes)
    model = LlamaForCausalLM(config)
    model.get_input_embeddings().weight.data[: models.NUM_SILENT_TOKENS] = 0
    models.write_huggingface(model, "llama", tmp_path)
    known = tmp_path / "known.json"
    settings = {OURS: {"policy": "orca", "max_batch_size": 32, "dtype": "fp32"}}
    known.write_text(json.dumps({"results": {"settings": settings}}))
    options: dict[str, Any] = {"dtype": "fp32", "models": str(tmp_path), "peers": str(tmp_path), "requests": 3}
    options |= {"cases": (OURS, "llama.cpp"), "settings_from": str(known)}
    for in_process in (False, True):
        section = run_suite(find_suite("orca-peers"), context_of(tmp_path), in_process=in_process, **options)
        assert section.status == "ok"
        found = json.loads((tmp_path / "orca-peers.json").read_text())["results"]
        assert [(run["case"], run["num_succeeded"]) for run in found["runs"]] == [(OURS, 3)]
        assert found["notes"] == {"llama.cpp": "not installed: benchmarks/peers/install.sh llama-cpp"}
        assert found["settings"] == settings

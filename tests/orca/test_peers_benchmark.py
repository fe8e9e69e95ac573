"""The pure parts of ``benchmarks/orca/peers.py``, and what drives its child processes, on an engine made up here."""

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlsys_core.workload import LoadResult, RequestRecord

FOLDER = Path(__file__).parents[2] / "benchmarks" / "orca"
NAMES = ("make_models", "contestants", "traffic", "findings", "runners", "child", "http_front", "peers")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The scripts beside ``peers.py``, imported as it imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / "engines"))
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            sys.modules.pop(name)


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


def test_traffic_is_seeded_and_the_same_for_text_and_ids(modules: dict[str, ModuleType]) -> None:
    traffic = modules["traffic"].make_traffic("llama", 2.0, num_requests=5, seed=3)
    assert traffic == modules["traffic"].make_traffic("llama", 2.0, num_requests=5, seed=3)
    assert traffic.prompts != modules["traffic"].make_traffic("llama", 2.0, num_requests=5, seed=4).prompts
    faster = modules["traffic"].make_traffic("llama", 4.0, num_requests=5, seed=3)
    assert faster.prompts == traffic.prompts
    assert faster.trace.items[-1].arrival_s < traffic.trace.items[-1].arrival_s

    ids = traffic.over_http({"temperature": 0}, takes_token_ids=True)
    texts = traffic.over_http({}, takes_token_ids=False)
    for item, text, child, prompt in zip(ids, texts, traffic.in_process(), traffic.prompts, strict=True):
        assert item.extra == {"temperature": 0, "prompt": list(prompt)}
        assert len(prompt) == item.num_input_tokens
        assert min(prompt) >= modules["make_models"].NUM_SILENT_TOKENS
        assert text.extra["prompt"].split() == [traffic.words[token].strip() for token in prompt]
        assert child == {"arrival_s": item.arrival_s, "prompt": list(prompt), "num_tokens": item.num_output_tokens}


def test_each_rate_has_prompts_of_its_own(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["peers.py", "online", "--rates", "1,2,4", "--requests", "20", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    benchmark = modules["peers"].Benchmark(modules["peers"].parse())
    sent = [prompt for traffic in benchmark.traffics() for prompt in traffic.prompts]
    assert len({prompt[:16] for prompt in sent}) == len(sent) == 60, "the first block of each is met for the first time"


def test_text_of_words_is_split_into_the_same_tokens(modules: dict[str, ModuleType]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens, merges = modules["make_models"].vocabulary(32000)
    assert len(set(tokens)) == 32000
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    traffic = modules["traffic"].make_traffic("llama", None, num_requests=8, seed=0)
    assert [tuple(tokenizer.encode(traffic.text(prompt)).ids) for prompt in traffic.prompts] == list(traffic.prompts)


def test_runs_with_other_token_counts_are_no_figures(modules: dict[str, ModuleType]) -> None:
    findings = modules["findings"]
    assert findings.problems_of(records(2), [3, 3]) == ()
    assert findings.problems_of(records(2), [3, 4]) == ("1 prompts of another length than asked for",)
    assert findings.problems_of(records(2, num_planned_tokens=5), [3, 3]) == (
        "2 answers of another length than asked for",
    )
    failed = records(2, error="http_500")
    assert findings.problems_of(failed, [3, 3]) == ("2 failed: http_500",)
    run = findings.Run("peer", "offline", failed, 0.0, findings.problems_of(failed, [3, 3]))
    assert findings.score_of(run, is_offline=True) == 0.0


def test_tuning_takes_throughput_offline_and_latency_online(modules: dict[str, ModuleType]) -> None:
    findings = modules["findings"]
    many, quick = (findings.Run("p", "t", result, 0.0, ()) for result in (records(8, seconds=2.0), records(2)))
    for is_offline, better, worse in ((True, many, quick), (False, quick, many)):
        scores = [findings.score_of(run, is_offline=is_offline) for run in (worse, better)]
        assert scores[0] < scores[1]
        assert findings.best_settings([({"n": 1}, scores[0]), ({"n": 2}, scores[1])]) == {"n": 2}
    assert findings.best_settings([({"n": 1}, 0.0)]) is None
    assert findings.best_settings([]) is None


def test_the_table_has_medians_agreement_and_the_largest_foreign_share(modules: dict[str, ModuleType]) -> None:
    findings = modules["findings"]
    runs = [
        findings.Run("peer", "offline", records(2, seconds=1.0, output=" c"), 0.25, ()),
        findings.Run("ours", "offline", records(2, seconds=2.0), 0.0, ()),
        findings.Run("peer", "offline", records(2, seconds=4.0), 0.5, ("1 failed: timeout",)),
        findings.Run("peer", "2 req/s", records(2), 0.0, ()),
    ]
    table = findings.table(runs, ours="ours", caption="all")
    rows = [dict(zip(("traffic", "name", "tokens", *table.columns[3:]), row, strict=True)) for row in table.rows]
    assert [(row["traffic"], row["name"]) for row in rows] == [
        ("offline", "peer"),
        ("offline", "ours"),
        ("2 req/s", "peer"),
    ]
    assert rows[0]["tokens"] == "5.0"  # of 8 and 2 tokens per second
    assert (rows[0]["as ours"], rows[1]["as ours"], rows[2]["as ours"]) == ("0%", "100%", "-")
    assert (rows[0]["foreign"], rows[0][""]) == ("50%", "1 failed: timeout")


def test_every_contestant_has_settings_to_choose_from_and_a_command(modules: dict[str, ModuleType]) -> None:
    contestants = modules["contestants"]
    for dtype in ("fp32", "bf16"):
        job = contestants.Job("llama", dtype, 2, Path("/models"), Path("/peers"))
        for contestant in contestants.CONTESTANTS:
            settings = contestant.settings(job)
            assert len(settings) >= 3
            assert len({json.dumps(each) for each in settings}) == len(settings)
            for each in settings:
                assert any("8001" in part for part in contestant.server(job, each, 8001))
                json.dumps(contestant.engine_options(job, each))
        named = {each.name: each.missing(job) for each in contestants.CONTESTANTS}
        assert named.pop(contestants.OURS) is None
        assert all(reason and "requirements.txt" in reason for reason in named.values())


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


def test_a_child_drives_its_engine_at_the_times_of_arrival(modules: dict[str, ModuleType]) -> None:
    engine = Echo()
    requests = [{"arrival_s": when, "prompt": [7, index], "num_tokens": 3} for index, when in enumerate((0, 0, 0.05))]
    answers = modules["child"].run(engine, requests, first_key=10)
    assert engine.most_at_once == 2
    assert [answer["tokens"] for answer in answers] == [[index] * 3 for index in range(3)]
    assert all(answer["token_s"] == sorted(answer["token_s"]) for answer in answers)
    assert answers[2]["sent_s"] >= 0.05
    assert answers[2]["token_s"][0] > answers[2]["sent_s"]


def test_a_childs_report_becomes_a_result(modules: dict[str, ModuleType]) -> None:
    traffic = modules["traffic"].make_traffic("llama", None, num_requests=2, seed=0)
    answers = [
        {"sent_s": 0.0, "token_s": [0.5] * item.num_output_tokens, "tokens": [300] * item.num_output_tokens}
        for item in traffic.trace
    ]
    result = modules["runners"].result_of(traffic, answers)
    assert modules["findings"].problems_of(result, [len(prompt) for prompt in traffic.prompts]) == ()
    assert result.records[0].output == traffic.words[300] * traffic.trace.items[0].num_output_tokens
    assert result.ttft is not None
    assert result.ttft.p50 == 0.5


FRONT = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from http_front import serve
from test_peers_benchmark import Echo
serve(Echo(), {index: f" w{index}" for index in range(400)}, int(sys.argv[3]))
"""


def test_the_http_front_streams_what_the_engine_gives(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    contestants, runners = modules["contestants"], modules["runners"]
    folders = [str(FOLDER / "engines"), str(Path(__file__).parent)]
    echo = contestants.Contestant(
        name="echo",
        environment=None,
        requirement="",
        settings=lambda job: [{}],
        server=lambda job, settings, port: ["-c", FRONT, *folders, str(port)],
        engine="none",
        engine_options=lambda job, settings: {},
        body={"temperature": 0},
    )
    job = contestants.Job("llama", "fp32", 1, tmp_path, tmp_path)
    traffic = modules["traffic"].make_traffic("llama", None, num_requests=6, seed=0)
    small = dataclasses.replace(traffic, prompts=tuple((1, 2, index) for index in range(6)))
    with runners.running(echo, job, {}, is_in_process=False, log=tmp_path / "log") as runner:
        result = runner.run(small)
        again = runner.run(small)
    for run in (result, again):
        assert modules["findings"].problems_of(run, [3] * 6) == ()
        for record in run.records:
            assert record.output == f" w{record.index}" * record.num_planned_tokens
            assert len(record.token_s) == record.num_planned_tokens


def test_a_contestant_that_ends_says_why(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    contestants, runners = modules["contestants"], modules["runners"]
    (ours,) = (each for each in contestants.CONTESTANTS if each.name == contestants.OURS)
    broken = dataclasses.replace(ours, server=lambda job, settings, port: ["-c", "raise SystemExit('no weights')"])
    job = contestants.Job("llama", "fp32", 1, tmp_path, tmp_path)
    with (
        pytest.raises(runners.NotReadyError, match="no weights"),
        runners.running(broken, job, {}, is_in_process=False, log=tmp_path / "log"),
    ):
        raise AssertionError("never reached")


def test_the_script_shows_its_help() -> None:
    shown = subprocess.run([sys.executable, FOLDER / "peers.py", "--help"], capture_output=True, text=True, check=True)
    assert "--settings-from" in shown.stdout


def test_a_contestant_that_there_is_not_is_refused_before_anything_runs():
    command = [sys.executable, FOLDER / "peers.py", "offline", "--only", "mlsys orca,vllm"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "no contestant 'vllm': there are mlsys orca, openvino-genai, llama.cpp" in shown.stderr

"""The commands beside ``serve``, as a user runs them, on the real model; and where serve's settings come from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlsys_core.cli.main import run

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"
LINES = [
    "Name two colours.",
    "",
    '{"prompt": "Say hi", "max_tokens": 2}',
    '{"prompt": "x", "nope": 1}',
    "What is a cat?",
]


def orca(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlsys_core", "orca", *arguments],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=200,
    )


def test_generate_answers_every_line_and_goes_on_where_it_ended(tmp_path: Path):
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(LINES) + "\n")
    options = ["--output", str(output), "--max-tokens", "8", "--threads", "1", "--dtype", "fp32"]
    assert orca("generate", str(source), *options).returncode == 0
    whole = output.read_text()
    answers = [json.loads(line) for line in whole.splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer.get("num_tokens") for answer in answers] == [8, 2, None, 8]
    assert "nope" in answers[2]["error"]
    assert answers[3]["text"].startswith("A cat is")
    output.write_text(whole[: len(whole) // 2])  # as if it had been killed while it wrote
    kept = output.read_text().rpartition("\n")[0]
    refused = orca("generate", str(source), *options)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert orca("generate", str(source), *options, "--resume").returncode == 0
    assert output.read_text() == whole
    assert whole.startswith(kept)


def test_generate_reads_a_pipe(tmp_path: Path):
    done = orca("generate", "-", "--raw", "--max-tokens", "2", "--threads", "1", text="The capital of France is\n")
    assert json.loads(done.stdout)["text"].startswith(" Paris"), done.stderr


def test_chat_keeps_a_history_and_obeys():
    said = "/nonsense\nName a colour.\nAnd one more.\n/system\n/clear\n/exit\n"
    done = orca("chat", "--threads", "1", "--max-tokens", "4", "--system", "Be brief.", text=said)
    assert done.returncode == 0, done.stderr
    assert "there is no /nonsense" in done.stdout
    assert "> Be brief.\n" in done.stdout


def test_explain_says_what_fits(capfd):
    assert run(["orca", "explain", MODEL, "--tokens", "512", "--dtype", "fp32"]) == 0
    text = capfd.readouterr().out
    assert re.search(r"keys and values\s+45\.0 KiB a token", text), "30 layers, 3 heads of 64, keys and values, fp32"
    slots = int(re.search(r"K/V slots\s+(\d+)", text)[1])
    assert re.search(rf"requests of 512 tokens\s+{slots // 512} at a time", text)
    assert f"--max-batch-size {min(64, slots // 512)}" in " ".join(text.split())


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "orca.toml"
    path.write_text('port = 99999\nmax-batch-size = 3\napi_key = ["a-secret"]\nspeculate = 2\n')
    return path


def test_flags_go_before_the_environment_and_that_before_the_file(settings: Path):
    done = orca(
        "serve", "no-such-model", "--config", str(settings), "--port", "0",
        MLSYS_ORCA_SPECULATE="1", MLSYS_ORCA_MAX_WAITING="7",
    )  # fmt: skip
    assert done.returncode == 2
    line = next(line for line in done.stderr.splitlines() if "settings:" in line)
    for said in ("port = 0 (flag)", "speculate = 1 (environment)", "max_waiting = 7 (environment)"):
        assert said in line
    for said in ("max_batch_size = 3 (file)", "api_key = *** (file)"):
        assert said in line
    assert "a-secret" not in done.stderr


def test_the_files_values_are_checked_as_flags_are(settings: Path, capfd):
    assert run(["orca", "serve", "no-such-model", "--config", str(settings)]) == 2
    assert "'--port'" in capfd.readouterr().err
    settings.write_text("ports = 1\n")
    assert run(["orca", "serve", "no-such-model", "--config", str(settings)]) == 2
    assert "there is no setting 'ports'" in capfd.readouterr().err
    settings.write_text("port =\n")
    assert run(["orca", "serve", "no-such-model", "--config", str(settings)]) == 2
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--adapter", "nothing"], "NAME=DIRECTORY"),
        (["--adapter", "x=/nowhere"], "no PEFT adapter"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["--policy", "orca", "--max-batch-tokens", "9"], "no option 'max_batch_tokens'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_serve_refuses_what_it_cannot_serve(arguments, says, capfd):
    # In this process, which has threads by now, and so cannot fork.
    assert run(["orca", "serve", MODEL, "--port", "0", "--single-process", *arguments]) == 2
    assert says in " ".join(capfd.readouterr().err.split())

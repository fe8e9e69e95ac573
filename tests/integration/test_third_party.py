"""A third party's package, really installed: what it registers of each kind is used by the command that reads it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.plugins import hookspecs

PACKAGE = Path(__file__).parent / "third_party"
Mlsys = Callable[..., "subprocess.CompletedProcess[str]"]
Serving = Callable[..., AbstractContextManager[str]]
WAIT_S = 300.0  # for a server that loads torch on a busy machine


@pytest.fixture(scope="module")
def python(install: Callable[..., Path]) -> Path:
    """The interpreter of an environment that sees this one's packages and holds the package; needs no index."""
    return install(PACKAGE)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Return the package's record of the parts used."""
    path = tmp_path / "notes"
    path.touch()
    return path


@pytest.fixture
def environment(notes: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLSYS_")}
    own |= {name: os.environ[name] for name in ("MLSYS_CACHE_DIR", "MLSYS_KERNEL_LEVEL") if name in os.environ}
    return {**own, "ACME_NOTES": str(notes), "MLSYS_PLUGINS_STRICT": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def mlsys(python: Path, environment: dict[str, str], tmp_path: Path) -> Mlsys:
    def call(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "mlsys_core", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def serving(python: Path, environment: dict[str, str], tmp_path: Path) -> Serving:
    @contextmanager
    def serving(*arguments: object) -> Iterator[str]:
        log = tmp_path / "server.log"
        command = [str(python), "-m", "mlsys_core", *map(str, arguments), "--port", "0"]
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=tmp_path)
        try:
            until = time.monotonic() + WAIT_S
            while not (found := re.search(r"(?:at|on) (http://127\.0\.0\.1:[0-9]+)", log.read_text())):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            yield found[1]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, log.read_text()

    return serving


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A tiny language model, as ``tests/orca`` makes it."""
    spec = importlib.util.spec_from_file_location("orca_conftest", PACKAGE.parents[1] / "orca" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    path: Path = made.write_gguf(tmp_path / "plain.gguf", made.tiny_metadata(), made.tiny_tensors())
    return path


@pytest.fixture
def zipped(gguf: Path, tmp_path: Path) -> Path:
    """The same as a file that only the package can load."""
    path = tmp_path / "tiny.acme-llm"
    path.write_bytes(gzip.compress(gguf.read_bytes()))
    return path


def test_it_registers_every_kind(mlsys: Mlsys) -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("mlsys_register_")}
    assert hooks == set(re.findall(r"def (mlsys_register_\w+)", (PACKAGE / "src/mlsys_acme/__init__.py").read_text()))
    assert len(hooks) == 13
    (row,) = [row for row in json.loads(mlsys("plugins", "list", "--json").stdout) if row["name"] == "acme"]
    assert (row["status"], row["error"]) == ("loaded", None)


def test_its_command_runs(mlsys: Mlsys) -> None:
    assert mlsys("acme").stdout == "hello from acme\n"
    assert mlsys("trace", "acme").stdout == "hello from acme\n"
    assert "acme" in mlsys("trace", "--help").stdout


def test_its_server_extension_adds_a_route_an_option_and_a_panel(
    mlsys: Mlsys, serving: Serving, gguf: Path, notes: Path, tmp_path: Path
) -> None:
    refused = mlsys("orca", "serve", gguf, "--acme-word", "", code=2)
    assert refused.stderr.splitlines()[-1] == "mlsys: error: --acme-word is empty: leave it out, or give a word"
    with serving("orca", "serve", gguf, "--acme-word", "good day") as url:
        said = json.load(urllib.request.urlopen(f"{url}/acme", timeout=WAIT_S))
        assert said == {"greeting": "good day", "model": "plain"}
        panels = json.load(urllib.request.urlopen(f"{url}/ui/score/panels", timeout=WAIT_S))
        assert panels == [["acme", {"greetings": 1}]]
        assert f"a greeting at {url}/acme" in (tmp_path / "server.log").read_text()
    noted = [line for line in notes.read_text().splitlines() if line.startswith("extension")]
    assert noted == ["extension started", "extension drained", "extension ended"]


def test_its_kernel_is_built_ahead(mlsys: Mlsys) -> None:
    said = mlsys("build", "--only", "acme-answer").stdout
    assert said.startswith("acme-answer: ")
    assert Path(said.split()[1]).name.startswith("answer-")


def test_its_exporter_writes(mlsys: Mlsys, tmp_path: Path) -> None:
    event = {"ph": "X", "name": "prefill", "ts": 0, "dur": 7, "pid": 1, "tid": 1}
    (tmp_path / "run.json").write_text(json.dumps({"traceEvents": [event]}))
    mlsys("trace", "export", "run.json", "--to", "acme-csv", "run.csv")
    assert (tmp_path / "run.csv").read_text() == "prefill,7000\n"


def test_its_benchmark_and_demo_step_run(mlsys: Mlsys, tmp_path: Path) -> None:
    assert "counted to three on acme:1" in mlsys("bench", "acme", "--device", "acme:1", "--output", "out").stdout
    assert json.loads((tmp_path / "out" / "acme.json").read_text())["device"] == "acme:1"
    assert "measures cpu, not acme" in mlsys("bench", "windtunnel-infer", "--device", "acme", code=2).stderr
    assert "hello from acme's step, on acme:1" in mlsys("demo", "--only", "acme", "--device", "acme:1").stdout
    skipped = mlsys("demo", "--only", "batchmaker", "--device", "acme").stdout
    assert "This step computes on cpu, not on acme." in skipped


def test_its_engine_serves(serving: Serving, mlsys: Mlsys) -> None:
    assert "acme" in mlsys("serve").stdout
    with serving("serve", "acme", "parrot") as url:
        body = {"inputs": [{"name": "said", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
        assert post(f"{url}/v2/models/parrot/infer", body)["outputs"][0]["data"] == [1, 2]


def test_orca_takes_its_loader_device_pool_policy_and_compiler(
    serving: Serving, mlsys: Mlsys, gguf: Path, zipped: Path, notes: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("hel\n")
    options = ("--raw", "--max-tokens", 8, "--dtype", "fp32", "--max-model-len", 64, "--threads", 1)
    plain = json.loads(mlsys("orca", "generate", "prompts", "--model", gguf, *options).stdout)
    assert notes.read_text() == ""
    named = ("--device", "acme:1", "--memory-pool", "acme-blocks")
    served = (
        "--policy",
        "acme",
        "--compiler",
        "acme",
        "--max-batch-size",
        3,
        "--max-model-len",
        64,
        "--dtype",
        "fp32",
        "--threads",
        1,
    )
    with serving("serve", "orca", zipped, *named, *served) as url:
        body = {"model": "tiny", "prompt": "hel", "max_tokens": 8, "temperature": 0}
        answer = post(f"{url}/v1/completions", body | {"model": "tiny.acme-llm"})
    assert answer["choices"][0]["text"] == plain["text"]
    said = notes.read_text().splitlines()
    assert "loaded tiny.acme-llm on acme:1" in said
    assert "acme:1 made a stream" in said
    assert "scheduler of 3 requests" in said
    assert "allocated 1 blocks" in said
    assert [f"compiled GatedMLP for [({rows}, 64)]" for rows in (1, 2, 4) for _ in range(2)] == sorted(
        line for line in said if line.startswith("compiled")
    )
    notes.write_text("")
    again = json.loads(mlsys("orca", "generate", "prompts", "--model", zipped, *named, *options).stdout)
    assert again["text"] == plain["text"]
    assert {"loaded tiny.acme-llm on acme:1", "acme:1 made a stream"} <= set(notes.read_text().splitlines())


def test_orca_refuses_what_the_loader_does_not_take(mlsys: Mlsys, zipped: Path, tmp_path: Path) -> None:
    refused = mlsys("orca", "explain", zipped, "--weights", "int8", code=2).stderr
    assert "this model's loader does not take --weights (it takes: --dtype, --backend)" in refused
    (tmp_path / "model.foo").write_text("no model")
    assert ".acme-llm, .gguf" in mlsys("orca", "explain", "model.foo", code=2).stderr


def test_batchmaker_takes_its_loader_device_pool_and_compiler(serving: Serving, notes: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "acme-cells.json").write_text(json.dumps({"name": "x", "num_words": 9, "hidden_size": 8}))
    body = {"inputs": [{"name": "words", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]}]}
    answers = []
    for options in ((), ("--device", "acme", "--memory-pool", "acme-runs", "--compiler", "acme")):
        notes.write_text("")
        with serving("batchmaker", "serve", "words", *options) as url:
            answers.append(post(f"{url}/v2/models/words/infer", body)["outputs"][0]["data"])
    assert answers[1] == pytest.approx(answers[0], abs=1e-5)
    said = notes.read_text()
    assert "loaded words" in said
    assert "acme:0 made a stream" in said
    assert "took a run of" in said
    assert "compiled WordLSTMCell for" in said


def test_dvabatch_takes_its_loader_device_policy_and_compiler(serving: Serving, notes: Path, tmp_path: Path) -> None:
    (tmp_path / "layers.acme-net").write_text("4")
    named = ("--device", "acme", "--policy", "acme", "--compiler", "acme", "--max-batch", 4)
    body = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    with serving("dvabatch", "serve", "layers.acme-net", *named) as url:
        with urllib.request.urlopen(f"{url}/v2/models/layers", timeout=WAIT_S) as answer:
            body["inputs"][0]["name"] = json.load(answer)["inputs"][0]["name"]
        got = post(f"{url}/v2/models/layers/infer", body)["outputs"][0]
    assert got["shape"] == [1, 4]
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    assert got["data"] == pytest.approx(layers(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist(), abs=1e-5)
    said = notes.read_text()
    assert "loaded layers.acme-net on acme:0" in said
    assert "acme:0 made a stream" in said
    assert "policy, cost-aware" in said
    assert said.count("compiled GraphModule") == 2


def test_windtunnel_takes_its_converter_and_device(
    mlsys: Mlsys, python: Path, environment: dict[str, str], notes: Path, tmp_path: Path
) -> None:
    """Within a vote, where a converter is asked for members too; without the package its operator stays on the host."""
    script = (
        "import numpy as np, joblib; from mlsys_acme.converter import Halver;"
        "from sklearn.ensemble import VotingClassifier;"
        "from sklearn.linear_model import LogisticRegression; from sklearn.pipeline import make_pipeline;"
        "x = np.random.default_rng(0).normal(size=(50, 3));"
        "members = [('halved', make_pipeline(Halver(), LogisticRegression())), ('plain', LogisticRegression())];"
        "joblib.dump(VotingClassifier(members, voting='soft').fit(x, x[:, 0] > 0), 'vote.joblib');"
        "np.savetxt('rows.csv', x[:8], delimiter=',', header='a,b,c', comments='')"
    )
    subprocess.run([python, "-c", script], check=True, env=environment, cwd=tmp_path)
    translate = (
        "windtunnel",
        "translate",
        "vote.joblib",
        "--trust-code",
        "--check",
        "rows.csv",
        "--example",
        "rows.csv",
    )
    assert "4 of 4 operators in the network" in mlsys(*translate, "-o", "translated").stdout
    (tmp_path / "rows.csv").write_text("a,b,c\n1,2,3\n-1,2,3\n")
    mlsys("windtunnel", "predict", "translated", "rows.csv", "-o", "answers.csv", "--device", "acme")
    assert notes.read_text() == "acme:0 made a stream\n"
    assert (tmp_path / "answers.csv").read_text() == "prediction\nTrue\nFalse\n"
    environment["MLSYS_PLUGINS_BLOCK"] = "acme"
    said = mlsys(*translate).stdout
    assert "3 of 4 operators in the network" in said
    assert "mlsys_acme.converter.Halver" in said


def test_names_that_are_not_there_are_refused_with_what_is(mlsys: Mlsys, gguf: Path) -> None:
    for options, said in (
        (("orca", "serve", gguf, "--device", "acne"), "allowed are cpu, cpu:INDEX, cuda, cuda:INDEX, acme, acme:INDEX"),
        (("orca", "serve", gguf, "--memory-pool", "acme-runs"), "this takes pools of blocks: acme-blocks, block"),
        (("batchmaker", "serve", ".", "--memory-pool", "acme-run"), "did you mean 'acme-runs'?"),
        (("orca", "serve", gguf, "--compiler", "acne"), "no compiler is called 'acne'; did you mean 'acme'?"),
        (("serve", "acm"), "did you mean 'acme'?"),
        (("trace", "export", "x.json", "y.csv", "--to", "csv"), "there are: acme-csv, chrome-trace"),
    ):
        line = mlsys(*options, code=2).stderr
        assert said in line
        assert line.count("\n") == 1

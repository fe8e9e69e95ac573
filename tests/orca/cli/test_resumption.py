"""``mlsys orca generate --resume``: killed at any moment, it goes on to the same file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.resumption import going_on, num_done

from tests.processes import until

SETTINGS = {"model": "tiny", "temperature": 1.0}


def line(index: int) -> str:
    return json.dumps({"index": index, "text": "a\u2028b"}, ensure_ascii=False) + "\n"


@given(num=st.integers(0, 4), cut=st.integers(0, 30))
def test_whatever_a_killed_run_left_is_cut_after_its_last_whole_answer(
    tmp_path_factory: pytest.TempPathFactory, num: int, cut: int
):
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    whole = "".join(map(line, range(num))).encode()
    next_line = line(num).encode()
    path.write_bytes(whole + next_line[: min(cut, len(next_line) - 1)])
    assert num_done(path) == num
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * cut)  # as a machine may leave it
    assert num_done(path) == num


def test_what_does_not_fit_is_refused(tmp_path: Path):
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\n")
    with going_on(output, str(source), SETTINGS, resumes=False) as first:
        assert first.num_done == 0
        output.write_text(line(0) + line(1)[:5])
        with (
            pytest.raises(InvalidInputError, match="another run"),
            going_on(output, str(source), SETTINGS, resumes=True),
        ):
            pass
    with going_on(output, str(source), SETTINGS, resumes=True) as second:
        assert second.num_done == 1
        assert [second.seed_of(index) for index in range(3)] == [first.seed_of(index) for index in range(3)]
    for name, settings, resumes, says in (
        ("in.txt", SETTINGS, False, "--resume"),
        ("in.txt", {**SETTINGS, "temperature": 0.0}, True, "temperature 1.0"),
        ("other.txt", SETTINGS, True, "another input"),
        ("-", SETTINGS, True, "standard input"),
    ):
        (tmp_path / "other.txt").write_text("one\nother\n")
        given_source = name if name == "-" else str(tmp_path / name)
        with pytest.raises(InvalidInputError, match=says), going_on(output, given_source, settings, resumes=resumes):
            pass
    with pytest.raises(InvalidInputError, match="--output"), going_on(None, str(source), SETTINGS, resumes=True):
        pass
    (tmp_path / "out.jsonl.resume").unlink()
    with pytest.raises(InvalidInputError, match="missing"), going_on(output, str(source), SETTINGS, resumes=True):
        pass
    assert output.read_text() == line(0)


def test_a_run_that_is_killed_again_and_again_writes_what_one_run_does(tiny_gguf: Path, tmp_path: Path):
    source = tmp_path / "in.jsonl"
    items = [{"prompt": f"say {index}", "ignore_eos": True, "max_tokens": 20 + index % 7} for index in range(60)]
    source.write_text("".join(json.dumps(item) + "\n" for item in items))

    def begin(output: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mlsys_core", "orca", "generate", str(source), "--model", str(tiny_gguf)]
        options = ["--output", str(output), "--temperature", "1", "--threads", "1", "--raw", "--resume"]
        return subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)

    whole = tmp_path / "whole.jsonl"
    assert begin(whole).wait() == 0
    answers = [json.loads(each) for each in whole.read_text().split("\n")[:-1]]
    assert [answer["index"] for answer in answers] == list(range(60))
    assert len({answer["text"] for answer in answers}) > 30  # it was sampled

    killed = tmp_path / "killed.jsonl"
    shutil.copy(f"{whole}.resume", f"{killed}.resume")  # the seed
    nbytes = whole.stat().st_size
    for share in (0.1, 0.5):
        while True:
            run = begin(killed)
            until(lambda least=share * nbytes: killed.exists() and killed.stat().st_size >= least, every_s=0.001)
            run.kill()
            run.wait()
            if killed.stat().st_size < nbytes:
                break
            killed.unlink()  # this process was held up until all was written: once more from the beginning
            shutil.copy(f"{whole}.resume", f"{killed}.resume")
    assert begin(killed).wait() == 0
    assert killed.read_bytes() == whole.read_bytes()
    assert begin(killed).wait() == 0  # nothing is left to do
    assert killed.read_bytes() == whole.read_bytes()

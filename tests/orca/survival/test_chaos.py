"""`mlsys orca chaos`: its verdicts, and the command on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.cli.main import run
from mlsys_orca.cli.chaos_client import verdict_of
from mlsys_serving.processes import can_supervise

from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf

PIECES = st.lists(st.sampled_from("abc"), min_size=1, max_size=6)


@given(st.dictionaries(st.integers(0, 1), PIECES, min_size=1), st.data())
def test_verdicts(answer: dict[int, list[str]], data: st.DataObject):
    index = data.draw(st.sampled_from(sorted(answer)))
    place = data.draw(st.integers(0, len(answer[index]) - 1))
    pieces = answer[index]
    assert verdict_of(answer, dict(answer)) == "equal"
    assert verdict_of(answer, answer | {index: pieces[:place] + pieces[place + 1 :]}) == "lost"
    assert verdict_of(answer, answer | {index: [*pieces[:place], pieces[place], *pieces[place:]]}) == "twice"
    assert verdict_of(answer, answer | {index: [*pieces[:place], "z", *pieces[place + 1 :]]}) == "different"


@pytest.mark.slow
@pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))
@pytest.mark.parametrize(
    ("trouble", "has_journal", "kinds"),
    [
        ("kill", True, ("front", "supervisor", "worker")),
        ("kill", False, ("front", "supervisor", "worker")),
        ("stop", False, ("worker",)),
    ],
)
def test_the_command(
    trouble: str, has_journal: bool, kinds: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {"llama.context_length": 4096}
    model = write_gguf(tmp_path / "tiny.gguf", tiny_metadata() | changes, tiny_tensors())
    command = ["orca", "chaos", str(model), "--seconds", "12", "--every", "0.6", "--streams", "6", "--threads", "1"]
    journal = ["--journal", str(tmp_path / "journal")] if has_journal else []
    assert run([*command, "--trouble", trouble, "--seed", "3", *journal]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    shown = {name.strip(): value for name, _, value in (line.rpartition("  ") for line in lines)}
    assert all(int(shown[f"{kind}s troubled"]) > 0 for kind in kinds)
    num_cut = int(shown["cut with their front"])
    assert int(shown["answers"]) == int(shown["equal to the undisturbed run"]) + num_cut
    assert num_cut == 0 or not (has_journal or trouble == "stop")


def test_a_front_that_hangs_is_not_promised(capsys: pytest.CaptureFixture[str]):
    assert run(["orca", "chaos", "no-such-model", "--trouble", "stop", "--who", "front"]) == 2
    assert "--trouble stop is for workers and ranks" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]):
    assert run(["orca", "chaos", "no-such-model"]) == 1
    assert "did not start: 'no-such-model'" in capsys.readouterr().err

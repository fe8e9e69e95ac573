"""``mlsys cache``: what is there is listed, what is named goes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlsys_core import config
from mlsys_core.cli.main import run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "cache"
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(path))
    config.settings.cache_clear()
    yield path
    config.settings.cache_clear()


def fill(folder: Path) -> None:
    for kind, nbytes in (("native", 3), ("packed", 2_000_000)):
        (folder / kind / "deeper").mkdir(parents=True)
        (folder / kind / "deeper" / "file").write_bytes(bytes(nbytes))
    outside = folder.parent / "outside"
    outside.write_bytes(bytes(5))
    (folder / "native" / "link").symlink_to(outside)


def test_an_empty_cache_has_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"] == []


def test_sizes_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    assert run(["cache", "list", "--json"]) == 0
    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)["kinds"]}
    assert {kind: (row["files"], row["nbytes"]) for kind, row in rows.items()} == {
        "native": (1, 3),
        "packed": (1, 2_000_000),
    }
    assert run(["cache", "list"]) == 0
    assert "2.0 MB      1 files  packed copies" in capsys.readouterr().out


def test_one_kind_is_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    assert run(["cache", "clear", "packed"]) == 0
    assert capsys.readouterr().out == "packed: 2.0 MB removed\n"
    assert [path.name for path in folder.iterdir()] == ["native"]
    assert run(["cache", "clear", "--all"]) == 0
    assert list(folder.iterdir()) == []
    assert (folder.parent / "outside").exists()


@pytest.mark.parametrize(("arguments", "says"), [([], "nothing was named"), (["../outside"], "is not cached")])
def test_what_is_not_there_is_refused(
    folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    assert run(["cache", "clear", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "there are native, packed, and --all" in error
    assert len(list(folder.iterdir())) == 2

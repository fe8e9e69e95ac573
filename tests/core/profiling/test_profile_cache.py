from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlsys_core.profiling import ProfileCache, ProfileKey, ProfileTable, UnitProfile

KEY = ProfileKey.of("cpu: 2 cores", {"torch": "2.11", "mlsys-core": "0.1"}, "lstm-1024-float32")
TABLE = ProfileTable((UnitProfile("cell", (1, 2), (0.1, 0.30000000000000004), (0.01, 0.02)),))


def never() -> ProfileTable:
    raise AssertionError("must not be measured")


def test_measured_once_and_then_read(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "deep" / "profiles")
    assert cache.get(KEY) is None
    assert cache.get_or_measure(KEY, lambda: TABLE) == TABLE
    assert ProfileCache(cache.cache_dir).get_or_measure(KEY, never) == TABLE
    assert [path.suffix for path in cache.cache_dir.iterdir()] == [".json"], "no temporary file is left"


@pytest.mark.parametrize(
    "other",
    [
        ProfileKey.of("cpu: 4 cores", dict(KEY.versions), KEY.content),
        ProfileKey.of(KEY.device, {"torch": "2.12", "mlsys-core": "0.1"}, KEY.content),
        ProfileKey.of(KEY.device, dict(KEY.versions), "lstm-2048-float32"),
    ],
)
def test_another_device_version_or_content_is_another_table(other: ProfileKey, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    assert cache.get(other) is None
    assert cache.path(other) != cache.path(KEY)


def test_the_order_of_versions_does_not_matter() -> None:
    assert (
        ProfileKey.of("cpu", {"a": "1", "b": "2"}, "x").digest()
        == ProfileKey.of("cpu", {"b": "2", "a": "1"}, "x").digest()
    )


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"key": {}, "table": {}}', "\x00"])
def test_a_damaged_file_is_ignored_with_a_warning_and_rebuilt(content: str, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    cache.path(KEY).write_text(content)
    with pytest.warns(RuntimeWarning, match="ignoring the profile"):
        assert cache.get_or_measure(KEY, lambda: TABLE) == TABLE
    assert cache.get_or_measure(KEY, never) == TABLE


def test_a_file_cut_short_and_one_with_a_bad_table_are_ignored(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    whole = cache.path(KEY).read_text()
    document = json.loads(whole)
    document["table"]["units"][0]["seconds"] = [0.1]
    for text in (whole[: len(whole) // 2], json.dumps(document)):
        cache.path(KEY).write_text(text)
        with pytest.warns(RuntimeWarning, match="will be measured again"):
            assert cache.get(KEY) is None


def test_the_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    other = ProfileKey.of("cpu", {}, "x")
    cache.path(KEY).rename(cache.path(other))
    with pytest.warns(RuntimeWarning, match="another key"):
        assert cache.get(other) is None


def test_a_folder_that_cannot_be_written_to_does_not_cost_the_table(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    cache = ProfileCache(tmp_path / "taken")
    with pytest.warns(RuntimeWarning, match="cannot keep profiles in"):
        assert cache.get_or_measure(KEY, lambda: TABLE) == TABLE

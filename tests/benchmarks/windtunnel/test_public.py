from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from mlsys_bench.windtunnel import public
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from rich.console import Console


def _context(folder: Path) -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=folder)


def test_a_set_is_scored_for_each_contestant_and_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    section = public.run(_context(tmp_path), data=("breast-cancer",))
    found = section.data["results"]["breast-cancer"]
    assert set(found) == set(public.CONTESTANTS)
    first = {contestant: facts["seeds"]["0"] for contestant, facts in found.items()}
    assert all(0.9 < each["score"] <= 1 and each["us_per_row"] > 0 for each in first.values())
    assert found["members"]["gain"]["se"] is None, "one seed has no error"
    assert first["tuned"]["options"].keys() == {"n_estimators"}, "one trial is LightGBM's own options"
    if not first["fine-tuned"]["epochs"]:
        assert first["fine-tuned"]["score"] == first["tuned"]["score"], "the source is kept as it is"
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["fit"] for line in lines[1:]] == [f"breast-cancer/0/{each}" for each in public.CONTESTANTS]
    path.write_text("\n".join(lines[:-1]) + '\n{"fit": "breast-canc')  # killed within the last line
    fitted = []
    monkeypatch.setattr(
        public, "fit_and_score", lambda contestant, *a, **k: fitted.append(contestant) or first["members"]
    )
    again = public.run(_context(tmp_path), data=("breast-cancer",))
    assert fitted == ["members"]
    assert again.data == section.data


def test_gains_are_over_the_same_seed():
    scores = {"tuned": (0.5, 0.6, 0.7), "members": (0.51, 0.59, 0.73), "TabM": (0.4,)}
    finished = {
        f"adult/{seed}/{name}": {"fit": "", "score": score}
        for name, found in scores.items()
        for seed, score in enumerate(found)
    }
    found = public.summary(finished)["adult"]
    assert found["members"]["gain"] == pytest.approx({"mean": 1.0, "se": 1.1547, "lowest": -1.0}, abs=1e-4)
    assert found["TabM"]["gain"]["mean"] == pytest.approx(-10)


def test_an_unknown_set_is_named(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="'iris' is no public set here; there are flights-3m"):
        public.run(_context(tmp_path), data=("iris",))

"""WindTunnel's tables: scores above other models, speed of exact answers, and what translates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import mean
from typing import Any

from mlsys_bench.figures.results import Ratio, load, processor, ratios, table

_MODELS = {
    "source": "source",
    "gbdt2nn": "GBDT2NN: L4, trees alone",
    "lightgbm": "LightGBM",
    "xgboost": "XGBoost",
    "catboost": "CatBoost",
    "leaves": "L1, trees alone",
}
_Scores = dict[int, float]  # test scores by seed


def scores(public: str, nearby: str) -> str:
    """Return how many points WindTunnel is above each other model: eight public sets, then 300,000 flights."""
    rows = [*_public(public), *_nearby(nearby)]
    cells = [[what, against, f"**{points:.2f}**", str(n), processor(name), f"`{command}`"]
             for points, what, against, n, name, command in sorted(rows)]  # fmt: skip
    return table(["what", "against", "points above", "seeds", "machine", "command"], cells)


_Row = tuple[float, str, str, int, str, str]  # points above, what, against, seeds, result file, command


def _public(name: str) -> list[_Row]:
    """Return how far members are above a tuned LightGBM and above peers, over the seeds that both have."""
    rows, command = [], "mlsys bench windtunnel-public first_seed=5"
    for data, contestants in load(name)["results"].items():
        ours = contestants["members"]["seeds"]
        score = "R2" if data in ("california", "movielens-100k") else "AUC"
        for each, facts in contestants.items():
            if each not in ("members", "fine-tuned"):
                points = 100 * mean(ours[seed]["score"] - found["score"] for seed, found in facts["seeds"].items())
                against = "LightGBM, tuned" if each == "tuned" else each
                rows.append((points, f"test {score}, {data}, members", against, len(facts["seeds"]), name, command))
    return rows


def _nearby(name: str) -> list[_Row]:
    """Return how far the fine-tuned pipeline is above each model of the experiments, over the seeds that both have."""
    found = _held_out_scores(name, "flights-3m")
    ours = found.pop("windtunnel")
    rows = []
    for model, theirs in found.items():
        points = [100 * (score - theirs[seed]) for seed, score in ours.items() if seed in theirs]
        what, command = "test AUC, 300,000 flights", "mlsys bench windtunnel-tables"
        rows.append((mean(points), what, model, len(points), name, command))
    return rows


def _held_out_scores(name: str, data: str) -> dict[str, _Scores]:
    """Return the test scores by seed of each model, with the options that the first seed's validation rows choose."""
    found: dict[str, dict[int, dict[int, tuple[float, float]]]] = {}
    for line in load(name)[1:]:
        of, _, pipe, model, share, candidate, seed = line["cell"].split("/")
        if of == data and share == "1":
            title = _MODELS.get(model, model) + (", logistic regression" if pipe == "pipe1" else "")
            scores = found.setdefault(title, {}).setdefault(int(candidate[9:]), {})
            scores[int(seed[4:])] = (line["valid"], line["test"])
    return {title: _chosen(candidates) for title, candidates in found.items()}


def _chosen(candidates: dict[int, dict[int, tuple[float, float]]]) -> _Scores:
    """Return the test scores of the candidate with most seeds and, of these, the best first validation score."""
    scores = max(candidates.values(), key=lambda seeds: (len(seeds), min(seeds.items())[1][0]))
    return {seed: test for seed, (_, test) in scores.items()}


_FORMS = {
    "the source": ("source", "source, 1 thread"),
    "LightGBM's Booster": ("LightGBM booster",),
    "ONNX Runtime": ("ONNX Runtime",),
    "treelite": ("treelite GTIL",),
    "tl2cgen": ("tl2cgen",),
    "Hummingbird": ("Hummingbird torch", "Hummingbird jit"),
}
_OURS = ("WindTunnel", "WindTunnel columns", "WindTunnel network")


def infer(name: str) -> str:
    """Return the speed of an exact answer over the fastest peer's, by model and rows; losses first."""
    rows, command = [], "mlsys bench windtunnel-infer"
    for model, found in load(name)["models"].items():
        for size in found["source"]["median_s"]:
            peers = {peer: time for peer, forms in _FORMS.items() if (time := _best_time(found, forms, size))}
            ours, peer = _best_time(found, _OURS, size), min(peers, key=lambda peer: peers[peer])
            if ours is not None:
                count = "a row" if size == "1" else f"{int(size):,} rows"
                rows.append(Ratio(peers[peer] / ours, f"{model}, {count}", peer, name, command))
    return ratios(rows)


def _best_time(found: Mapping[str, Any], cases: tuple[str, ...], size: str) -> float | None:
    times = [found[case]["median_s"][size] for case in cases if size in found.get(case, {}).get("median_s", {})]
    return min(times, default=None)


def coverage(name: str) -> str:
    """Return the outcomes of translations, by family of sources and translator."""
    outcomes = ("exact", "host", "close", "refused", "crashed", "wrong")
    found = load(name)["results"]
    rows = []
    for family in dict.fromkeys(line["family"] for line in found):
        sources = [line for line in found if line["family"] == family]
        for index, translator in enumerate(key for key in found[0] if key not in ("family", "name")):
            counts = [sum(line[translator]["outcome"] == each for line in sources) for each in outcomes]
            rows.append([family if index == 0 else "", translator, *(str(count or "") for count in counts)])
    return table(["sources", "translator", *outcomes], rows)


def options(name: str) -> str:
    """Return the outcomes of the option sets of each class, and why WindTunnel is not exact."""
    lines = [line for line in load(name)["results"] if line["family"].startswith("options, ")]
    translators = [key for key in lines[0] if key not in ("family", "name")]
    by_class: dict[tuple[str, str], list[Any]] = {}
    for line in lines:
        by_class.setdefault((line["family"][len("options, ") :], line["name"].partition("(")[0]), []).append(line)
    rows, family = [], ""
    for (library, kind), sets in by_class.items():
        found = [_outcomes([line[each]["outcome"] for line in sets]) for each in translators]
        shown = [(line["name"], line[translators[0]]) for line in sets]
        rows.append([library if library != family else "", f"`{kind}`", str(len(sets)), *found, _why(shown)])
        family = library
    return table(["library", "class", "sets", *translators, "where WindTunnel is not exact"], rows)


def _outcomes(outcomes: list[str]) -> str:
    counts = Counter(outcomes)
    return outcomes[0] if len(counts) == 1 else ", ".join(f"{count} {each}" for each, count in counts.items())


def _why(sets: list[tuple[str, Mapping[str, str]]]) -> str:
    """Return the reasons of refusals; of what stays on the host, that it does."""
    reasons = [found["reason"] for _, found in sets if found["outcome"] == "refused"]
    short = [each.partition("translated: ")[2] or each for each in reasons]
    return "; ".join(dict.fromkeys(each.partition("; register")[0].replace("|", "/")[:160] for each in short))

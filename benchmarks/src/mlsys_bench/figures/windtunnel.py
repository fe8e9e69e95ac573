"""WindTunnel's tables: exact answers against peers, fits of the experiments, and the search for options."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from mlsys_bench.figures.results import best, load, number, table

_NAMES = {
    "source": "source",
    "windtunnel": "**WindTunnel**, L4",
    "gbdt2nn": "GBDT2NN: L4, trees alone",
    "leaves": "L1, trees alone",
    **{level: level for level in ("L1", "L2", "L3")},
    "cold": "cold, L4",
    "lightgbm": "LightGBM",
    "xgboost": "XGBoost",
    "catboost": "CatBoost",
    "mlp": "MLP with embeddings",
    "tabm": "TabM",
    "deepgbm": "like DeepGBM",
}
_PIPES = {
    "pipe1": "logistic regression",
    "pipe2": "LightGBM",
    "pipe3": "factorisation machine of leaves",
    "mf": "matrix factorisation",
    "fm": "factorisation machine",
    "-": "",
}
Scores = dict[int, float]  # test scores by seed


class Key(NamedTuple):
    """The fits that differ by candidate and seed alone."""

    data: str
    columns: str
    pipe: str
    model: str
    share: str


class _Fits(NamedTuple):
    """Fits of the candidate that the first seed's validation rows choose."""

    candidate: int
    num_candidates: int
    valid: Scores
    test: Scores


def fits_of(name: str) -> dict[Key, _Fits]:
    """Return the fits of a journal by what was fitted."""
    found: dict[Key, dict[int, dict[int, tuple[float, float]]]] = {}
    for line in load(name)[1:]:
        *parts, candidate, seed = line["cell"].split("/")
        candidates = found.setdefault(Key(*parts), {}).setdefault(int(candidate[9:]), {})
        candidates[int(seed[4:])] = (line["valid"], line["test"])
    return {key: _chosen(candidates, is_error="movielens" in key.data) for key, candidates in found.items()}


def _chosen(candidates: dict[int, dict[int, tuple[float, float]]], *, is_error: bool) -> _Fits:
    sign = -1 if is_error else 1
    candidate = max(candidates, key=lambda index: (len(candidates[index]), sign * min(candidates[index].items())[1][0]))
    scores = sorted(candidates[candidate].items())
    valid, test = ({seed: pair[part] for seed, pair in scores} for part in (0, 1))
    return _Fits(candidate, len(candidates), valid, test)


def _score(value: float) -> str:
    return _short(value, 4)


def _with_error(values: list[float], digits: int = 4) -> str:
    """Return a mean with its standard error, of one value the value."""
    parts = [mean(values), *([stdev(values) / len(values) ** 0.5] if len(values) > 1 else [])]
    return " ± ".join(_short(part, digits) for part in parts)


def _short(value: float, digits: int) -> str:
    """Return ``value`` without a zero before its point, and without a sign where it rounds to zero."""
    text = f"{round(value, digits) + 0.0:.{digits}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text)


def points_above(ours: Scores, theirs: Scores) -> str:
    """Return how far ``ours`` is above ``theirs`` in points, on the seeds that both have."""
    gains = [100 * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs]
    return _with_error(gains, 2) if gains else ""


def held_out_scores(name: str, data: str) -> dict[str, dict[int, float]]:
    """Return the test scores by seed of each model, by its name without marks."""
    found = {key: value for key, value in fits_of(name).items() if key.data == data and key.share == "1"}
    return {_title(key).replace("**", "").partition(", L4")[0]: value.test for key, value in found.items()}


def fits(name: str, data: str = "flights-3m") -> str:
    """Return the test scores by seed, their mean, and how far WindTunnel is above each."""
    found = {key: value for key, value in fits_of(name).items() if key.data == data and key.share == "1"}
    seeds = sorted({seed for value in found.values() for seed in value.test})
    rows = []
    order = list(_NAMES)
    translations = {key.pipe: value for key, value in found.items() if key.model == "windtunnel"}
    for key, value in sorted(
        found.items(), key=lambda item: (item[0].pipe == "-", item[0].pipe, order.index(item[0].model))
    ):
        ours = translations.get(key.pipe, next(iter(translations.values())))
        gain = "" if key.model == "windtunnel" else points_above(ours.test, value.test)
        cells = [_score(value.test[seed]) if seed in value.test else "" for seed in seeds]
        chosen = f"{value.candidate + 1} ({value.num_candidates} tried)"
        validation = _score(min(value.valid.items())[1])
        rows.append([_title(key), chosen, validation, *cells, _with_error(list(value.test.values())), gain])
    columns = ["test AUC", "candidate", "validation", *(f"seed {seed}" for seed in seeds), "mean"]
    return table([*columns, "WindTunnel above, points"], rows)


def _title(key: Key) -> str:
    pipe = {"pipe1": ", logistic regression"}.get(key.pipe, "")
    return _NAMES[key.model] + pipe


def gains(*names: str) -> str:
    """Return means over seeds of each source and its translation, and what is gained."""
    rows = []
    for name in names:
        journal = fits_of(name)
        for key, ours in journal.items():
            theirs = journal.get(key._replace(model="source"))
            if key.model == "windtunnel" and theirs is not None and key.data != "flights-3m":
                pairs = [(score, theirs.test[seed]) for seed, score in ours.test.items() if seed in theirs.test]
                sign = -1 if "movielens" in key.data else 1
                rows.append(
                    [
                        f"`{name.removesuffix('.jsonl').removeprefix('windtunnel-tables-')}`",
                        key.columns.title() if key.columns != "-" else "",
                        _PIPES[key.pipe],
                        str(len(pairs)),
                        *(_with_error([pair[side] for pair in pairs]) for side in (1, 0)),
                        _with_error([100 * sign * (score - source) for score, source in pairs], 3),
                        str(sum(sign * score < sign * source for score, source in pairs)),
                    ]
                )
    columns = ["run", "columns", "model", "seeds", "source", "WindTunnel", "gain in points", "fits below the source"]
    return table(columns, rows)


def levels(name: str) -> str:
    """Return test scores by share of the training rows and level, over the seeds that all levels have."""
    journal = fits_of(name)
    models = ["source", "L1", "L2", "L3", "windtunnel"]
    rows = []
    for share in dict.fromkeys(key.share for key in journal):
        scores = {key.model: value.test for key, value in journal.items() if key.share == share}
        seeds = sorted(set.intersection(*(set(scores[model]) for model in models)))
        values = {model: [scores[model][seed] for seed in seeds] for model in models}
        steps = [
            _with_error([100 * (b - a) for a, b in zip(values[low], values[high], strict=True)], 2)
            for low, high in (("source", "L1"), ("L1", "L2"), ("L2", "L3"), ("L3", "windtunnel"))
        ]
        means = [mean(values[model]) for model in models]
        cells = best([_with_error(values[model]) for model in models], means, lowest=False)
        rows.append([f"{float(share) * 300_000:,.0f}", str(len(seeds)), *cells, ", ".join(steps)])
    columns = ["training rows", "seeds", "source", "L1", "L2", "L3", "L4", "points gained by each step"]
    return table(columns, rows)


def preparations(name: str) -> str:
    """Return test scores, validation in brackets, by columns, model and start; of one seed."""
    journal = fits_of(name)
    models = ["source", "windtunnel", "gbdt2nn", "cold"]
    rows = []
    for columns, pipe in dict.fromkeys((key.columns, key.pipe) for key in journal):
        fitted = {key.model: fit for key, fit in journal.items() if (key.columns, key.pipe) == (columns, pipe)}
        values = [fitted[model].test[0] if model in fitted else None for model in models]
        cells = [f"{_score(fitted[m].test[0])} ({_score(fitted[m].valid[0])})" if m in fitted else "" for m in models]
        rows.append([columns.title(), _PIPES[pipe], *best(cells, values, lowest=False)])
    return table(["columns", "", "source", "WindTunnel", "GBDT2NN", "cold, the best of three rates"], rows)


def search(name: str) -> str:
    """Return validation scores by epoch, the start first, for each set of options; what all share is left out."""
    lines = load(name)[1:]
    tried = [_options(line) for line in lines]
    shared = {key for key in tried[0] if all(options.get(key) == tried[0][key] for options in tried)}
    rows = []
    for line, options in zip(lines, tried, strict=True):
        epochs = ", ".join(_score(value) for value in line["valid_by_epoch"])
        gain = [_short(100 * part, 2) for part in line.get("gain", ())]
        words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items() if key not in shared)
        rows.append([words or "as all", epochs, " ± ".join(gain)])
    return table(["options", "validation by epoch", "gain in points"], rows)


def _options(line: Mapping[str, Any]) -> dict[str, Any]:
    results = {"valid_by_epoch", "train_loss", "seconds", "best_epoch", "gain", "test", "options", "valid_rows"}
    return {**{key: value for key, value in line.items() if key not in results}, **line.get("options", {})}


def infer(name: str) -> str:
    """Return the time of an exact answer, by model and rows, and the difference in the answers."""
    forms = {
        "WindTunnel": ("WindTunnel", "WindTunnel columns", "WindTunnel network"),
        "source or Booster": ("source", "source, 1 thread", "LightGBM booster"),
        "ONNX Runtime": ("ONNX Runtime",),
        "treelite, tl2cgen": ("treelite GTIL", "tl2cgen"),
        "Hummingbird": ("Hummingbird torch", "Hummingbird jit"),
    }
    rows = []
    for model, found in load(name)["models"].items():
        for index, size in enumerate(found["source"]["median_s"]):
            times = [_best_time(found, cases, size) for cases in forms.values()]
            cells = best(["" if seconds is None else _duration(seconds) for seconds in times], times)
            rows.append([model if index == 0 else "", f"{int(size):,}", *cells])
    return table(["model", "rows", *forms], rows)


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


def drift(name: str) -> str:
    """Return what each contestant recovers of full retraining's gain, over all weeks and seeds."""
    rows, result = [], load(name)
    lines = {contestant: [score for line in found for score in line] for contestant, found in result["auc"].items()}

    def share(low: str, high: str, margin: float = 0.0) -> str:
        """Return the share of weeks in which one contestant is below another by more than ``margin``."""
        pairs = list(zip(lines[low], lines[high], strict=True))
        return f"{sum(one < other - margin for one, other in pairs) / len(pairs):.0%}"

    for contestant, found in result["summary"].items():
        is_other = contestant not in ("frozen", "retrained", "WindTunnel update")
        rows.append(
            [
                contestant,
                f"{found['auc']:.4f}",
                f"{found['recovered']:.0%}",
                f"{100 * found['lowest']:.2f}",
                share(contestant, "frozen", 0.001),
                share(contestant, "WindTunnel update") if is_other else "",
                share(contestant, "retrained") if contestant not in ("frozen", "retrained") else "",
                "" if found["seconds"] is None else f"{found['seconds']:.1f}",
            ]
        )
    columns = ["model", "mean AUC", "of retraining's gain", "worst week, AUC points"]
    columns += ["weeks a tenth below frozen", "weeks WindTunnel is above it", "weeks retraining is above it"]
    return table([*columns, "longest update, s"], rows)


def training(name: str) -> str:
    """Return rows a second while training, by level: medians and the best of the kernel, and torch's form."""
    rates = load(name)["rows_per_s"]
    rows = []
    for level in ("L1", "L2", "L3", "L4"):
        kernel, plain = rates[f"{level} kernel"], rates[f"{level} torch"]
        figures = (median(kernel), max(kernel), median(plain), max(plain))
        rows.append([level, *(f"{round(figure, -2):,.0f}" for figure in figures)])
    return table(["level", "kernel", "best", "torch", "best of torch"], rows)


def distil(name: str) -> str:
    """Return the scores of a pipeline, its students and their teacher, by data set."""
    rows = []
    for data, found in load(name)["results"].items():
        means = [f"{mean(found['scores'][each]):.4f}" for each in ("pipeline", "on labels", "distilled", "teacher")]
        rate = found["rows_per_s"]
        speed = f"{rate['distilled'] / rate['pipeline']:.1f} x, {rate['distilled'] / rate['teacher']:.0f} x"
        rows.append([data, *means, f"{found['share_on_labels']:.0%}", f"{found['share']:.0%}", speed])
    columns = ["set", "pipeline", "fine-tuned on labels", "distilled", "teacher", "of the teacher's gain, on labels"]
    return table([*columns, "of the teacher's gain, distilled", "speed beside pipeline's, teacher's"], rows)


def public(name: str) -> str:
    """Return what members and peers gain over a tuned pipeline, and what an answer costs, by data set; losses first."""
    found = load(name)["results"]
    rows: list[tuple[float, list[str]]] = []
    peers = [
        each for each in ("XGBoost", "CatBoost", "RealMLP", "TabM") if any(each in sets for sets in found.values())
    ]
    for data, contestants in found.items():
        seeds = {each: facts["seeds"] for each, facts in contestants.items()}
        scores = [each["score"] for each in seeds["tuned"].values()]
        gains = [_gain(contestants.get(each)) for each in ("members", "fine-tuned", *peers)]
        exact, members = (list(seeds[each].values()) for each in ("fine-tuned", "members"))
        pairs = list(zip(members, exact, strict=True))
        added = [pair for pair in pairs if len(pair[0]["shares"]) > 1]
        cost = [
            mean(one[field] / other[field] for one, other in added) if added else 1
            for field in ("us_per_row", "nbytes")
        ]
        cells = [data, f"{mean(scores):.4f}", gains[0], f"{contestants['members']['gain']['lowest']:+.2f}", *gains[1:]]
        cells += [f"{len(added)} of {len(pairs)}", f"{cost[0]:.0f} x, {cost[1]:.0f} x"]
        rows.append((contestants["members"]["gain"]["mean"], cells))
    columns = ["set", "tuned LightGBM", "members, points above", "lowest seed", "fine-tuned without", *peers]
    return table(
        [*columns, "seeds with members added", "time and size of an answer"], [cells for _, cells in sorted(rows)]
    )


def _gain(facts: Mapping[str, Any] | None) -> str:
    """Return points above the tuned pipeline, with the standard error where there are several seeds."""
    if facts is None:
        return ""
    gain = facts["gain"]
    return f"{gain['mean']:+.2f}" + ("" if gain["se"] is None else f" ± {gain['se']:.2f}")


def _best_time(found: Mapping[str, Any], cases: tuple[str, ...], size: str) -> float | None:
    times = [found[case]["median_s"][size] for case in cases if size in found.get(case, {}).get("median_s", {})]
    return min(times, default=None)


def _duration(seconds: float) -> str:
    return f"{number(seconds * 1e6)} us" if seconds < 1e-3 else f"{number(seconds * 1e3)} ms"

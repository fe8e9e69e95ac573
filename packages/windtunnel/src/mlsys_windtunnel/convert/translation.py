"""From a fitted pipeline to a module: parse, convert each operator, cut off the host's part, wire the rest.

Imputers of text and vectorisers stay on the host as plain data, so that files can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.convert.registry import Converted, ConverterRegistry, default_registry
from mlsys_windtunnel.frontend import HOST_DATA, Frontend, FrontierValue
from mlsys_windtunnel.host.fill import PATTERNS, Filler, Words
from mlsys_windtunnel.host.lookup import is_missing
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import Reference, WindTunnelModule
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule
from mlsys_windtunnel.modules.columns.columns import Concatenate, Scale, Select, Unstored
from mlsys_windtunnel.modules.network import Network, Wire
from mlsys_windtunnel.modules.ties import fingerprint
from mlsys_windtunnel.parse.boosters import as_estimator
from mlsys_windtunnel.parse.graph import Kind, Operator, PipelineGraph
from mlsys_windtunnel.parse.libraries import check_installed
from mlsys_windtunnel.parse.names import known_name, public_name
from mlsys_windtunnel.parse.pipeline import parse_pipeline
from mlsys_windtunnel.parse.questions import makes_frames
from mlsys_windtunnel.parse.source import checked_values, contract_of


@torch.inference_mode(False)
def translate(
    fitted: Any,
    X_example: Table | None = None,  # noqa: N803 - scikit-learn's name
    *,
    dtype: torch.dtype = torch.float64,
    registry: ConverterRegistry | None = None,
) -> WindTunnelModule:
    """Translate a fitted scikit-learn pipeline or estimator into a trainable module that answers as it does.

    Operators without a converter stay as they are and run on the host, before the translated part. Where stored points
    may be equally near to a row, the module keeps a copy of ``fitted`` and asks it about tables with such rows.

    Args:
        fitted: The pipeline or estimator.
        X_example: A few rows of its input; needed only where a fallback operator does not tell how wide its output is.
        dtype: Dtype to compute in; float64 answers within 1e-6 of the source, float32 rounds inputs and thresholds.
        registry: Converters to use instead of the built-in and installed ones.

    Raises:
        InvalidInputError: not fitted, nothing of it can be translated, or a width is unknown without ``X_example``.
        MissingDependencyError: the plugin that converts a part of it is not installed.

    Example:
        >>> from sklearn.linear_model import LogisticRegression
        >>> source = LogisticRegression().fit([[0.0], [1.0], [2.0]], [0, 0, 1])
        >>> module = translate(source)
        >>> bool(abs(module.predict_proba([[1.5]]) - source.predict_proba([[1.5]])).max() < 1e-6)
        True
    """
    graph, registry = parse_pipeline(fitted), registry or default_registry()
    modules, lookups, fallbacks = _convert(graph, registry)
    host = host_operators(graph, set(fallbacks), set(lookups))
    translated = [operator for operator in graph.operators if operator.name not in host]
    if graph.output.name not in {operator.output.name for operator in translated}:
        reasons = "; ".join(sorted(set(fallbacks.values()))) or "no converter for an empty pipeline"
        raise InvalidInputError(
            f"the last operator cannot be translated: {reasons}; "
            "register one with mlsys_register_converters, or see the coverage page for what is supported"
        )
    wires, frontier = _wire(translated, lookups, registry)
    frontend = Frontend(graph, operators=_on_host(graph, host, modules, frontier), frontier=frontier)
    features = [value.name for value in graph.features]
    network = Network(_widths(frontend, X_example), wires, modules, features=features)
    if graph.features_are_deep:
        network.features_are_deep = True
    network.to(dtype)
    module = WindTunnelModule(frontend, network).eval()
    if (predictor := module.predictor) is not None:  # a wrapper may offer less than what it wraps
        source = as_estimator(fitted)
        predictor.answers = frozenset(name for name in predictor.answers if hasattr(source, name))
    if network.can_tie:
        network.origin = fingerprint(network)
        module.reference = _reference(fitted)
    return module


def _reference(fitted: Any) -> Reference | None:
    """Return a copy of the source, which its caller may fit anew; None, so that ties are refused, if it has none."""
    try:
        return Reference(deepcopy(fitted))
    except Exception:  # noqa: BLE001  third-party code
        return None


def _convert(
    graph: PipelineGraph, registry: ConverterRegistry
) -> tuple[dict[str, OperatorModule], dict[str, Converted], dict[str, str]]:
    """Return by operator name: modules, look-ups, and the reasons why the others are fallbacks."""
    modules: dict[str, OperatorModule] = {}
    lookups: dict[str, Converted] = {}
    fallbacks: dict[str, str] = {}
    for operator in graph.operators:
        converted = convert_operator(operator, registry)
        if isinstance(converted, str):
            fallbacks[operator.name] = converted
            continue
        modules[operator.name] = converted.module
        if converted.lookup is not None:
            lookups[operator.name] = converted
    return modules, lookups, fallbacks


def convert_operator(operator: Operator, registry: ConverterRegistry) -> Converted | str:
    """Convert one operator, or return why it stays as it is."""
    if operator.kind is Kind.SELECT:
        return Converted(Select(operator.columns or ()))
    if operator.kind is Kind.CONCATENATE:
        return Converted(Concatenate())
    if operator.kind is Kind.UNSTORED:
        return Converted(Unstored())
    if operator.kind is Kind.SCALE:
        assert operator.weight is not None
        return Converted(Scale(operator.weight))
    is_combiner = operator.kind is Kind.COMBINE
    own = public_name(type(operator.estimator))  # a plugin may know a subclass by its own name
    if is_combiner:
        converter = registry.find_combiner(own) or registry.find_combiner(operator.source)
    else:
        converter = registry.find(own) or registry.find(operator.source)
    if converter is None and not is_combiner and registry.find_combiner(operator.source) is not None:
        return (
            f"the members of {operator.source} cannot be joined as they were fitted: all of them constant, labels of "
            "their own, or a sparse target; fit it on a dense target with each class in every fold or code"
        )
    if converter is None:
        check_installed(operator.source or "")
        return f"no converter for {operator.source}"
    converted = converter(operator.estimator)
    if isinstance(converted, OperatorModule):
        converted = Converted(converted)
    if isinstance(converted, Converted) and _answers(converted.module, operator.methods):
        return converted
    what = getattr(converted, "what", "its options, and does not say which")
    return f"the converter of {operator.source} declines {what}"


def _answers(module: OperatorModule, methods: tuple[str, ...]) -> bool:
    """Return whether a module has the answers that others in the graph want of its source."""
    wanted = {"predict" if method == "labels" else method for method in methods}
    return not wanted or (isinstance(module, PredictorModule) and wanted <= module.answers)


def _on_host(
    graph: PipelineGraph, host: set[str], modules: dict[str, OperatorModule], frontier: list[FrontierValue]
) -> list[Operator]:
    """Return the host's operators in their order, each as it runs there.

    What is read by an estimator's own code is made by the source's own code too, so that it is in the container that it
    is in there: sparse, a frame, an array. All else is plain data where it has that form.
    """
    found: dict[str, Operator] = {}
    needed = {name for value in frontier for name in value.reads}
    own: set[str] = set()  # values that estimators' own code reads
    for operator in reversed([each for each in graph.operators if each.name in host]):
        value = operator.output.name
        if value not in needed:
            continue
        if value in own and value in graph.composites:
            source, estimator = graph.composites[value]
            operator = replace(operator, kind=Kind.TRANSFORM, inputs=(source,), estimator=estimator, methods=())
            operator = replace(operator, source=known_name(type(estimator)))
        elif value not in own or operator.kind is Kind.COMBINE:
            operator = _as_plain(operator, modules)
        found[value] = operator
        reads = {each.name for each in operator.inputs}
        needed |= reads
        looks = operator.kind in (Kind.TRANSFORM, Kind.PREDICT) and not isinstance(operator.estimator, HOST_DATA)
        if looks or value in own or operator.kind is Kind.UNSTORED:
            own |= reads
    return list(reversed(found.values()))


def _as_plain(operator: Operator, modules: dict[str, OperatorModule]) -> Operator:
    """Return an operator of the host as data where it has that form, the join of answers as its module."""
    if operator.kind is Kind.TRANSFORM:
        data = as_data(operator.estimator)
        return operator if data is None else replace(operator, estimator=data)
    if operator.kind is not Kind.COMBINE:
        return operator
    if operator.name not in modules:
        raise InvalidInputError(
            f"{operator.name}: no converter joins the answers of the members of {operator.source}; "
            "leave the registry at its default, or give it combiners"
        )
    return replace(operator, estimator=modules[operator.name])


def _wire(
    operators: list[Operator], lookups: dict[str, Converted], registry: ConverterRegistry
) -> tuple[list[Wire], list[FrontierValue]]:
    """Return the network's wires, and the values that they read from the host."""
    made = {operator.output.name for operator in operators}
    frontier: dict[str, FrontierValue] = {}
    wires: list[Wire] = []
    for operator in operators:
        reads = tuple(value.name for value in operator.inputs)
        if operator.name in lookups:
            converted = lookups[operator.name]
            codes = f"{operator.name} codes"
            frontier[codes] = FrontierValue(codes, reads, converted.num_codes, converted.lookup)
            reads = (codes,)
        else:
            for value in operator.inputs:
                if value.name not in made:
                    frontier.setdefault(value.name, FrontierValue(value.name, (value.name,), value.width))
        known = {*frontier, *(wire.name for wire in wires)}
        methods = ("transform",) if operator.kind is Kind.TRANSFORM else operator.methods
        wires.append(Wire(operator.output.name, reads, methods, _checks(operator, reads, known, wires, registry)))
    return wires, list(frontier.values())


def _checks(
    operator: Operator, reads: tuple[str, ...], known: set[str], wires: list[Wire], registry: ConverterRegistry
) -> tuple[tuple[str, Contract], ...]:
    """Return those of the values ``known`` that an operator's source checks and no earlier one checks alike."""
    contract = contract_of(operator, registry.bounds(operator.source))
    if contract is None:
        return ()
    names = reads if operator.kind is Kind.TRANSFORM else [value.name for value in checked_values(operator)]
    seen = [check for wire in wires for check in wire.checks]
    return tuple(
        (name, contract)
        for name in names
        if name in known and not any(name == other and contract.is_like(like) for other, like in seen)
    )


def _widths(frontend: Frontend, example: Table | None) -> list[tuple[str, int]]:
    """Return names and columns of the frontier: as the graph says, or as they come out for the example."""
    if example is not None:
        tables = frontend.tables(example)
        return [(value.name, table.shape[1]) for value, table in zip(frontend.frontier, tables, strict=True)]
    widths = []
    for value in frontend.frontier:
        if value.width is None:
            raise InvalidInputError(
                f"{value.name} does not tell its number of columns: pass X_example (--example), a few input rows"
            )
        widths.append((value.name, value.width))
    return widths


def host_operators(graph: PipelineGraph, fallbacks: set[str], lookups: set[str]) -> set[str]:
    """Return names of the operators that run on the host: fallbacks, and all that these or look-ups depend on."""
    producers = {operator.output.name: operator for operator in graph.operators}
    host: set[str] = set()
    pending = [producers[name] for name in fallbacks]
    pending += [each for each in graph.operators if each.kind is Kind.UNSTORED and each.inputs[0].is_sparse is None]
    pending += [
        producers[value.name] for name in lookups for value in producers[name].inputs if value.name in producers
    ]
    while pending:
        operator = pending.pop()
        if operator.name not in host:
            host.add(operator.name)
            pending += [producers[value.name] for value in operator.inputs if value.name in producers]
    if host or lookups or not _reads_all(graph):  # the raw table may hold text: numbers are picked out of it first
        on_host = {graph.input.name, *(producer for producer, made_by in producers.items() if made_by.name in host)}
        for operator in graph.operators:
            if operator.kind is Kind.SELECT and operator.inputs[0].name in on_host:
                host.add(operator.name)
                on_host.add(operator.output.name)
    return host


def _reads_all(graph: PipelineGraph) -> bool:
    """Return whether each column of the input is computed with; one that is not may hold anything."""
    if graph.input.width is None:
        return not any(operator.kind is Kind.SELECT for operator in graph.operators)
    indices = {graph.input.name: tuple(range(graph.input.width))}  # columns of the input in values that only pick some
    read: set[int] = set()
    for operator in graph.operators:
        for value in operator.inputs:
            if value.name not in indices:
                continue
            if operator.kind is Kind.SELECT:
                indices[operator.output.name] = tuple(indices[value.name][column] for column in operator.columns or ())
            else:
                read.update(indices[value.name])
    read.update(indices.get(graph.output.name, ()))
    return len(read) == graph.input.width


def as_data(estimator: Any) -> Filler | Words | None:
    """Return a fitted estimator as plain data that transforms as it does; None where it stays as it is."""
    rule = _RULES.get(public_name(type(estimator)))
    return None if rule is None else rule(estimator)


def _simple_imputer(estimator: Any) -> Filler | None:
    kind = estimator._fit_dtype.kind
    if estimator.add_indicator or kind not in "Ofiu" or estimator._fit_dtype == np.float32:
        return None
    marker = _plain(estimator.missing_values)
    values = [_plain(value) for value in estimator.statistics_.tolist()]
    if not _is_cell(marker) or not all(map(_is_cell, values)) or estimator.keep_empty_features:
        return None
    kept = tuple(index for index, value in enumerate(values) if not is_missing(value))
    takes_all = is_missing(marker) and not isinstance(marker, float)
    return Filler(
        marker=np.nan if is_missing(marker) else marker,
        kept=kept,
        values=tuple(values[index] for index in kept),
        is_of_numbers=kind != "O",
        takes_all_missing=takes_all,
        reads_numbers=estimator.strategy in ("mean", "median"),
        refuses_none=marker is not None and makes_frames(estimator),
    )


def _vectoriser(estimator: Any) -> Words | None:
    options = ("preprocessor", "tokenizer", "strip_accents", "analyzer")
    has_code = any(callable(getattr(estimator, option)) for option in options)
    is_of_words = estimator.analyzer == "word"
    if has_code or estimator.input != "content" or (is_of_words and estimator.token_pattern not in PATTERNS):
        return None
    if np.dtype(estimator.dtype) not in (np.dtype(np.int64), np.dtype(np.float64)):
        return None
    is_weighted = type(estimator).__name__ == "TfidfVectorizer"
    return Words(
        vocabulary={str(word): int(index) for word, index in estimator.vocabulary_.items()},
        analyzer=estimator.analyzer,
        ngrams=(int(estimator.ngram_range[0]), int(estimator.ngram_range[1])),
        pattern=estimator.token_pattern if is_of_words else "",
        stop_words=tuple(sorted(estimator.get_stop_words() or ())) if is_of_words else (),
        lowercase=bool(estimator.lowercase),
        strip_accents=estimator.strip_accents or None,
        is_binary=bool(estimator.binary),
        idf=tuple(map(float, estimator.idf_)) if is_weighted and estimator.use_idf else None,
        norm=estimator.norm if is_weighted else None,
        sublinear=bool(is_weighted and estimator.sublinear_tf),
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_cell(value: Any) -> bool:
    return value is None or is_missing(value) or isinstance(value, str | bool | int | float)


_RULES: dict[str, Callable[[Any], Filler | Words | None]] = {
    "sklearn.impute.SimpleImputer": _simple_imputer,
    "sklearn.feature_extraction.text.CountVectorizer": _vectoriser,
    "sklearn.feature_extraction.text.TfidfVectorizer": _vectoriser,
}

"""Translated pipelines in a folder: a state dict as safetensors, and all else as JSON.

``load`` needs neither scikit-learn nor pickle and runs nothing that the folder names, so a folder from a stranger can
be a wrong model but no program. What is written, and how it is read safely, is ``export/plain.py``. torch and numpy
check each index, native kernels do not: what points outside its table is refused at loading (:func:`check_sound`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.backends.direct.program import direct_program
from mlsys_windtunnel.backends.soft.trees import SoftGroupParameters, SoftTrees
from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.export.plain import DAMAGE, Reader, Writer, check_schema
from mlsys_windtunnel.frontend import Frontend
from mlsys_windtunnel.host.fill import Words
from mlsys_windtunnel.host.lookup import UNKNOWN, CategoryLookup, HashLookup, Vocabulary
from mlsys_windtunnel.module import METHODS, WindTunnelModule
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from mlsys_windtunnel.modules.tree.trees import Trees

FORMAT, VERSION = "mlsys-windtunnel", 3
MOST_COLUMNS = 1 << 20  # of raw rows and of the packed table: a folder must not ask for memory without end
GRAPH_FILE, TENSORS_FILE = "graph.json", "tensors.safetensors"


def save(module: WindTunnelModule, directory: Path | str) -> Path:
    """Write ``module`` into ``directory``, which is made if need be; earlier files of an artifact are replaced.

    Args:
        module: Without fallback operators.
        directory: Folder to write to.

    Returns:
        The directory.

    Raises:
        InvalidInputError: the module has fallback operators or holds what is no plain data, or the folder cannot be
            written.

    Example:
        >>> save(translate(fitted_pipeline), "churn")  # doctest: +SKIP
        >>> load("churn").predict_proba(frame)  # doctest: +SKIP
    """
    from safetensors.torch import save as to_bytes

    refuse_fallbacks(module.frontend, "pickle it, or train the pipeline with operators that are covered")
    writer = Writer()
    graph = {
        "format": FORMAT,
        "version": VERSION,
        "frontend": writer.write(module.frontend, "frontend"),
        "network": writer.write(module.network, "network"),
    }
    tensors = to_bytes(writer.tensors)
    graph["sha256"] = hashlib.sha256(tensors).hexdigest()
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / TENSORS_FILE).write_bytes(tensors)
        (path / GRAPH_FILE).write_text(json.dumps(graph, indent=1, allow_nan=False), encoding="ascii")
    except OSError as error:
        raise InvalidInputError(f"the artifact cannot be written to {path}: {error}") from error
    return path


def load(directory: Path | str) -> WindTunnelModule:
    """Load the module in ``directory``, in evaluation mode, as :func:`save` wrote it.

    Args:
        directory: A folder with ``graph.json`` and ``tensors.safetensors``.

    Raises:
        InvalidInputError: no artifact, a damaged one, of another version, or one that names what is not allowed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    path = Path(directory)
    try:
        graph = json.loads((path / GRAPH_FILE).read_text(encoding="ascii"))
        data = (path / TENSORS_FILE).read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"{path} is no artifact: it needs {GRAPH_FILE} and {TENSORS_FILE} ({error.strerror or error})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path / GRAPH_FILE} is damaged: it is no JSON ({error})") from error
    _check_header(graph, data, path)
    try:
        tensors = from_bytes(data)
    except (SafetensorError, *DAMAGE) as error:
        raise InvalidInputError(f"{path / TENSORS_FILE} is damaged ({error})") from error
    module = _read(graph, tensors, path)
    _try(module, path)
    return module


def refuse_fallbacks(frontend: Frontend, advice: str) -> None:
    """Raise InvalidInputError if operators run on the host as they are, naming them and what to do instead."""
    if frontend.fallbacks:
        raise InvalidInputError(
            f"{', '.join(dict.fromkeys(frontend.fallbacks))} cannot be saved as plain data, since it runs on the host "
            f"as it is; {advice}"
        )


def _check_header(graph: Any, data: bytes, path: Path) -> None:
    if not isinstance(graph, dict) or graph.get("format") != FORMAT:
        raise InvalidInputError(f"{path / GRAPH_FILE} is not of the format {FORMAT}")
    if graph.get("version") != VERSION:
        raise InvalidInputError(
            f"{path / GRAPH_FILE} is of version {graph.get('version')!r}; this program reads version {VERSION}"
        )
    check_schema(graph, "graph", path / GRAPH_FILE)
    if graph.get("sha256") != hashlib.sha256(data).hexdigest():
        raise InvalidInputError(f"{path / TENSORS_FILE} is damaged: it is not the file that {GRAPH_FILE} was made with")


def _read(graph: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> WindTunnelModule:
    reader = Reader(tensors)
    try:
        frontend, network = reader.read(graph["frontend"]), reader.read(graph["network"])
        if not isinstance(frontend, Frontend) or not isinstance(network, Network):
            raise TypeError("frontend and network are other things than these")
        module = WindTunnelModule(frontend, network).eval()
        check_sound(module)
        return module
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except DAMAGE as error:
        raise InvalidInputError(
            f"{path / GRAPH_FILE} is damaged: it does not describe a module ({type(error).__name__}: {error})"
        ) from error


def _ask(module: WindTunnelModule) -> None:
    """Ask each method for raw rows of zeros, in each form that the source takes; a refusal is an answer."""
    frontend = module.frontend
    names, width = frontend.columns, frontend.width
    for cell in (0.0, np.nan):
        rows = np.full((2, width or 1), cell)
        inputs: list[Any] = [rows, rows.astype(object), rows[:, :0]]
        if names is not None:
            inputs.append(dict.fromkeys(names, rows[:, 0]))
        for method in METHODS:
            for x in inputs if hasattr(module, method) else ():
                with contextlib.suppress(InvalidInputError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _check_width(module, method, getattr(module, method)(x))


def _check_width(module: WindTunnelModule, method: str, answer: Any) -> None:
    """Compare a column of each class with the classes: with fewer names, an answer would be one of those left."""
    num_classes = len(module.predictor.classes) if module.predictor is not None else 0
    if num_classes and method == "predict_proba" and answer.shape != (len(answer), num_classes):
        raise ValueError(f"it has {num_classes} classes, and probabilities of shape {answer.shape}")


def _try(module: WindTunnelModule, path: Path) -> None:
    """Run two rows of zeros, which every module takes: parts that do not fit together show here, not in service."""
    try:
        width = module.network.width
        if not 0 <= width <= MOST_COLUMNS or not 0 <= (module.frontend.width or 0) <= MOST_COLUMNS:
            raise ValueError(f"it has more than {MOST_COLUMNS:,} columns")
        with torch.inference_mode():
            answer = module(torch.zeros(2, width, dtype=module.dtype))
        if answer.shape[0] != 2 or [name for name, _ in module.network.frontier] != [
            value.name for value in module.frontend.frontier
        ]:
            raise ValueError("its parts do not fit together")
        direct_program(module.network)
        _ask(module)
    except (AssertionError, RuntimeError, StopIteration, *DAMAGE) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInputError(f"{path}: the module does not run ({reason})") from error


def check_sound(module: WindTunnelModule) -> None:
    """Look at trees, soft trees, and embeddings with the look-ups that they read.

    Raises:
        InvalidInputError: something points outside its table.
    """
    for part in module.modules():
        if isinstance(part, Trees):
            _check_trees(part)
        elif isinstance(part, SoftTrees):
            _check_soft_trees(part)
    for each in module.frontend.host_data:
        _check(not isinstance(each, Words) or each.is_sound, "words")
    lookups = {value.name: value.lookup for value in module.frontend.frontier}
    for lookup in lookups.values():
        if isinstance(lookup, CategoryLookup):
            _check(len(lookup.names) == len(lookup.vocabularies), "categories")
            for vocabulary in lookup.vocabularies:
                _check_vocabulary(vocabulary)
    frontier = module.network.frontier
    is_made_of_pairs = isinstance(frontier, tuple) and all(isinstance(pair, tuple | list) for pair in frontier)
    _check(is_made_of_pairs and [*map(len, frontier)] == [2] * len(frontier), "tables")
    rules, width = module.frontend.rules, module.frontend.width or 0
    for columns in (rules.number_columns, rules.passed_columns, rules.category_columns or ()):
        is_of_numbers = isinstance(columns, tuple) and all(type(column) is int for column in columns)
        _check(is_of_numbers and all(0 <= column < width for column in columns), "columns")
    for wire, operator in zip(module.network.wires, module.network.operators, strict=True):
        for _, contract in wire.checks:
            _check_contract(contract)
        if isinstance(operator, CategoryEmbedding):
            _check_embedding(operator, lookups.get(wire.inputs[0]) if len(wire.inputs) == 1 else None)


def _check_contract(contract: Contract) -> None:
    flags = (contract.takes_nan, contract.takes_inf, contract.rounds_to_float32)
    _check(isinstance(contract.estimator, str) and all(isinstance(flag, bool) for flag in flags), "checks")
    bounds = (contract.low, contract.high)
    _check(all(bound is None or (type(bound) in (int, float) and bound == bound) for bound in bounds), "checks")


def _check_trees(trees: Trees) -> None:
    ensemble = trees.ensemble
    splits, leaves = len(ensemble.feature), len(ensemble.leaf_value)
    each = (ensemble.threshold, ensemble.left, ensemble.right, ensemble.missing_left, ensemble.category_set)
    _check(all(array.shape == (splits,) for array in each), "trees")
    _check(ensemble.leaf_value.ndim == 2 and ensemble.num_trees > 0 and ensemble.feature.ndim == 1, "trees")
    _check(_is_within(ensemble.feature, 0, ensemble.num_features), "trees")
    children = np.concatenate([ensemble.left, ensemble.right, ensemble.root])
    _check(_is_within(children, -leaves, splits), "trees")
    inner = children[children >= 0]
    _check(len(np.unique(inner)) == len(inner), "trees")  # each has one parent, so that no walk turns in circles
    starts = ensemble.leaf_start
    _check(len(starts) == ensemble.num_trees + 1 and _is_ascending(starts, leaves), "trees")
    _check_categories(ensemble)
    groups = int(trees.num_groups)
    _check(groups >= 1 and ensemble.num_trees % groups == 0, "trees")
    _check(groups == 1 or ensemble.num_outputs == 1, "trees")
    width = groups if groups > 1 else ensemble.num_outputs
    _check(trees.bias is None or trees.bias.shape == (width,), "trees")


def _check_categories(ensemble: TreeEnsemble) -> None:
    starts = ensemble.category_start
    _check(_is_within(ensemble.category_set, -1, max(len(starts) - 1, 0)), "trees")
    _check(_is_ascending(starts, len(ensemble.category_left)), "trees")


def _check_soft_trees(trees: SoftTrees) -> None:
    num_slots = 0
    for group in trees.groups:
        assert isinstance(group, SoftGroupParameters)
        leaf, left = group.leaf, group.left
        _check(leaf.ndim == 3 and left.ndim == 2, "soft trees")
        num_trees, num_leaves, _ = leaf.shape
        num_splits = left.shape[1]
        num_slots += num_trees * num_splits
        _check(left.shape == group.right.shape == (num_trees, num_splits), "soft trees")
        _check(group.count.shape == (num_trees, num_leaves), "soft trees")
        _check(group.path.shape == (num_trees, num_leaves, num_splits), "soft trees")
        _check(group.num_splits.shape == (num_trees,), "soft trees")
        _check(_is_within(group.num_splits.numpy(), 0, num_splits + 1), "soft trees")
        for children in (left.numpy(), group.right.numpy()):
            _check(_is_within(children, -num_leaves, num_splits), "soft trees")
        _check(left.dtype == group.right.dtype == group.num_splits.dtype, "soft trees")
    own = (trees.feature, trees.scale, trees.threshold, trees.missing)
    _check(all(tensor.shape == (num_slots,) for tensor in own), "soft trees")
    num_columns = len(trees.columns.mean) + len(trees.columns.tables)
    _check(_is_within(trees.feature.numpy(), 0, num_columns + 1), "soft trees")


def _check_vocabulary(vocabulary: Vocabulary) -> None:
    codes = np.array([*vocabulary._code_of.values(), vocabulary._code_of_missing], np.int64)
    _check(_is_within(codes, UNKNOWN, vocabulary.size), "categories")
    if vocabulary._numbers is not None:
        _check(vocabulary._numbers.shape == vocabulary._codes_of_numbers.shape, "categories")
        _check(_is_within(vocabulary._codes_of_numbers, 0, vocabulary.size), "categories")


def _check_embedding(embedding: CategoryEmbedding, lookup: Any) -> None:
    """Check that each code of the look-up is a row of the table; an unknown one is the last, or in a bucket."""
    _check(isinstance(lookup, CategoryLookup) and len(lookup.vocabularies) == len(embedding.tables), "categories")
    more = lookup.num_buckets if isinstance(lookup, HashLookup) else 1
    for vocabulary, table in zip(lookup.vocabularies, embedding.tables, strict=True):
        _check(table.ndim == 2 and more >= 1 and 0 <= vocabulary.size <= len(table) - more, "categories")


def _is_within(values: npt.NDArray[Any], low: int, end: int) -> bool:
    return values.dtype.kind in "iu" and bool(((values >= low) & (values < end)).all())


def _is_ascending(starts: npt.NDArray[Any], end: int) -> bool:
    """Return whether the values are starts of ranges and the end of the last, all within a table of ``end``."""
    is_range = len(starts) > 0 and starts[0] == 0 and starts[-1] == end
    return bool(is_range) and starts.dtype.kind in "iu" and bool((np.diff(starts) >= 0).all())


def _check(is_sound: Any, what: str) -> None:
    if not is_sound:
        raise InvalidInputError(f"its {what} point outside their tables: it is damaged or forged")

"""Safe loading of a fitted estimator from a file.

skops files are loaded without running untrusted code, and refused where they name types that neither skops nor
:data:`KNOWN_TYPES` vouches for. joblib and pickle files can run any code while they load, so they need the user's word.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.parse.boosters import as_estimator

_PICKLES = (".joblib", ".pkl", ".pickle")
_MODELS = {".txt": "lightgbm", ".json": "xgboost", ".ubj": "xgboost"}  # files of boosters, read by native code
# What skops leaves to the reader, by module. Plain Python classes without code of their own for loading, functions that
# look at data alone, and trees, which are checked.
_KNOWN = {
    "collections": "OrderedDict",
    "functools": "partial",
    "numpy": "dtype",
    "mlsys_windtunnel.estimators.categories": "BinaryEncoder HashEncoder TwoHotEncoder",
    "mlsys_windtunnel.estimators.factorization_machine": "FactorizationMachineClassifier FactorizationMachineRegressor",
    "mlsys_windtunnel.estimators.matrix_factorization": "MatrixFactorizationRegressor",
    "sklearn._loss.loss": "HalfTweedieLoss HalfTweedieLossIdentity",
    "sklearn.calibration": "_CalibratedClassifier _SigmoidCalibration",
    "sklearn.cluster._bisect_k_means": "_BisectingTree",
    "sklearn.cluster._kmeans": "_kmeans_single_elkan _kmeans_single_lloyd",
    "sklearn.ensemble._hist_gradient_boosting.predictor": "TreePredictor",
    "sklearn.feature_selection._univariate_selection": "chi2 f_classif f_oneway f_regression r_regression",
    "sklearn.feature_selection._mutual_info": "mutual_info_classif mutual_info_regression",
    "sklearn.gaussian_process.kernels": "CompoundKernel ConstantKernel DotProduct Exponentiation ExpSineSquared Matern "
    "PairwiseKernel Product RBF RationalQuadratic Sum WhiteKernel",
    "sklearn.metrics._classification": "balanced_accuracy_score",
    "sklearn.metrics._scorer": "_CurveScorer _Scorer",
    "sklearn.multiclass": "_ConstantPredictor",
    "sklearn.neural_network._stochastic_optimizers": "AdamOptimizer SGDOptimizer",
    "sklearn.tree._tree": "Tree",
    "sklearn.utils._bunch": "Bunch",
    "sklearn.utils._metadata_requests": "MetadataRequest MethodMetadataRequest",
    "sklearn.utils.validation": "check_array",
}
KNOWN_TYPES = frozenset(f"{module}.{name}" for module, names in _KNOWN.items() for name in names.split())
_NODE = "TreeNode"  # skops' name of what it reads trees with


def load_estimator(path: Path, *, trust_code: bool = False) -> Any:
    """Load the estimator of a ``.skops``, ``.joblib``, ``.pkl`` or ``.pickle`` file, or the booster of a model file.

    Model files are LightGBM's ``.txt`` and XGBoost's ``.json`` and ``.ubj``.

    Args:
        path: The file.
        trust_code: Load what could run untrusted code or crash the process. Only for files whose maker is trusted.

    Raises:
        InvalidInputError: no such file, another kind of file, damaged, or not to be loaded without ``trust_code``.
    """
    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file; give a fitted pipeline saved by skops or joblib")
    suffix = path.suffix.lower()
    if suffix == ".skops":
        return _load_skops(path, trust_code=trust_code)
    if suffix not in _PICKLES and suffix not in _MODELS:
        raise InvalidInputError(
            f"{path}: cannot load {suffix or 'a file without suffix'}; give .skops, {', '.join((*_PICKLES, *_MODELS))}"
        )
    if suffix in _MODELS:
        return _load_booster(path, suffix, trust_code=trust_code)
    if not trust_code:
        raise InvalidInputError(
            f"{path} is a {suffix.removeprefix('.')} file, which can run any code while it loads; if you trust its "
            "maker, pass --trust-code (trust_code=True); skops files are safe to load"
        )
    import joblib

    with _damage_as_error(path):
        return joblib.load(path)


def _load_booster(path: Path, suffix: str, *, trust_code: bool) -> Any:
    if not trust_code:
        raise InvalidInputError(
            f"{path} is read by {_MODELS[suffix]}'s native code, which trusts each index in it: a forged one could "
            "crash the process; if you trust its maker, pass --trust-code (trust_code=True)"
        )
    with _damage_as_error(path):
        library = importlib.import_module(_MODELS[suffix])
        booster = library.Booster(model_file=str(path))
    return as_estimator(booster)


def _load_skops(path: Path, *, trust_code: bool) -> Any:
    import skops.io

    from mlsys_windtunnel.parse.tree_safety import check_trees

    with _damage_as_error(path):
        untrusted = skops.io.get_untrusted_types(file=path)
    unknown = [name for name in untrusted if name not in KNOWN_TYPES]
    if unknown and not trust_code:
        raise InvalidInputError(
            f"{path} holds types that are not trusted, since they could run untrusted or unchecked native code: "
            f"{', '.join(unknown)}; if you know them and trust the file's maker, pass --trust-code (trust_code=True)"
        )
    with _damage_as_error(path), checked_trees():
        loaded = skops.io.load(path, trusted=untrusted)
        if not trust_code:
            check_trees(loaded)
    return loaded


@contextlib.contextmanager
def _damage_as_error(path: Path) -> Iterator[None]:
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} is not loaded: {error}") from error
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"{path} needs a package that is not installed: {error}") from error
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).strip().splitlines()
        detail = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
        raise InvalidInputError(f"{path} cannot be loaded; it is damaged or of another format ({detail})") from error


@contextmanager
def checked_trees() -> Iterator[None]:
    """Have skops look at trees' tables while the context is open.

    Raises:
        InvalidInputError: raised by the load within; tables of other dimensions, types or sizes than a tree has.
    """
    from skops.io._audit import NODE_TYPE_MAPPING

    replaced = {key: node for key, node in NODE_TYPE_MAPPING.items() if key[0] == _NODE}
    NODE_TYPE_MAPPING.update({key: _checked(node) for key, node in replaced.items()})
    try:
        yield
    finally:
        NODE_TYPE_MAPPING.update(replaced)


def _checked(base: Any) -> Any:
    class CheckedTreeNode(base):  # type: ignore[misc]  # skops has no types
        def _construct(self) -> Any:
            _check(self.args.construct(), self.attrs.construct())
            return super()._construct()

    return CheckedTreeNode


def _check(args: Any, state: Any) -> None:
    from sklearn.tree._tree import NODE_DTYPE

    if not isinstance(args, tuple) or len(args) != 3 or not isinstance(state, dict):
        raise InvalidInputError("a tree in it is damaged: it has no tables")
    num_features, num_classes, num_outputs = args
    tables: list[Any] = [state.get(name) for name in ("nodes", "values", "node_count")]
    nodes, values, count = tables
    shape = (getattr(nodes, "shape", None), getattr(values, "shape", (None,))[:1])
    is_right = (
        _is_table(num_classes, 1, np.dtype(np.intp))
        and _is_table(nodes, 1, NODE_DTYPE)
        and _is_table(values, 3, np.dtype(np.float64))
        and all(type(each) is int for each in (num_features, num_outputs, count, state.get("max_depth")))
        and num_features >= 0
        and len(num_classes) == num_outputs == values.shape[1]
        and len(nodes) == len(values) == count
    )
    if not is_right:
        raise InvalidInputError(f"a tree in it is damaged: its tables have shapes {shape} for {count!r} nodes")


def _is_table(table: Any, num_dimensions: int, dtype: Any) -> bool:
    return type(table) is np.ndarray and table.ndim == num_dimensions and table.dtype == dtype

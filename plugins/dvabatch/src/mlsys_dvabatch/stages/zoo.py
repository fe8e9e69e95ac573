"""Models by name or file, in stages: what ``mlsys dvabatch serve``, ``profile`` and ``bench`` take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.device import Device, get_device
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.graphs import Graph, new_graph
from mlsys_core.models import resolve_model
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.loading import LoadContext, endings, find_loader, find_module_compiler, load_with
from mlsys_dvabatch.scheduling.costs import TableCosts, catch_up_s, unit_name
from mlsys_dvabatch.stages.model import ServableModel, Wire
from mlsys_dvabatch.stages.profile import boundary_nbytes, profile_operators
from mlsys_dvabatch.stages.slicing.exits import ExitingModel
from mlsys_dvabatch.stages.slicing.partition import diversity_cuts, even_cuts
from mlsys_dvabatch.stages.slicing.program import Program, load_program, program_of
from mlsys_dvabatch.stages.slicing.sized import SizedModel
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.vision import SHAPES
from torch import Tensor

ENGINE = "dvabatch"
ENCODER = "all-minilm-l6-v2"  # a folder that has a name in mlsys models list


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to be profiled or served."""

    name: str
    model: ServableModel
    wire: Wire | None = None  # form of its requests; None: its inputs' rows
    device: Device | None = None  # device of its weights; None: host memory

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to profile at; (1,) where inputs have one shape."""
        return self.model.lengths

    @property
    def has_exits(self) -> bool:
        """True if requests may leave behind each stage, by their intermediate results."""
        return hasattr(self.model, "inspect")

    def request(self, length: int) -> Any:
        """Return a payload of ``length`` units."""
        return self.model.example_of(length)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Options of loading a model; a loader refuses by name those that it has no use for."""

    num_stages: int | None = None  # None: four; two of an encoder and of a program whose requests have several sizes
    shape: tuple[int, ...] | None = None  # shape of a request, for ONNX files
    is_packed: bool = False  # encoders without padding
    compiler: str | None = None  # registered name of what compiles each stage; None: they run as they are
    slice_at: str = "time"  # "time": even stages; "diversity": cuts where preferred batch sizes change most
    trust_code: bool = False  # let a ``.pt2`` file run code that it holds
    exit_confidence: float | None = None  # requests leave at the first output that sure; None: they run to the end
    exit_rule: str = "confidence"  # measure of an output's certainty
    mask: str | None = None  # input that is 0 in the padding of a program with a dynamic length; None: found by trying
    weights: str = "float"  # "int8": products of a packed encoder multiply int8 values: faster, a little less exact
    device: Device | None = None  # device of the weights; None: host memory

    def context(self) -> LoadContext:
        """Return the options that differ from the defaults, as loaders take them.

        Raises:
            InvalidInputError: No compiler has that name.
        """
        has_exits = self.exit_confidence is not None
        given: dict[str, Any] = {
            "stages": self.num_stages,
            "shape": self.shape,
            "packed": self.is_packed or None,
            "compiler": self.compiler and find_module_compiler(self.compiler, installed_plugins().registry),
            "slice_at": self.slice_at if self.slice_at != "time" else None,
            "exit_confidence": self.exit_confidence,
            "mask": self.mask,
            "weights": self.weights if self.weights != "float" else None,
            "exit_rule": self.exit_rule if has_exits and self.exit_rule != "confidence" else None,
        }
        return LoadContext(
            device="cpu" if self.device is None else self.device.name,
            trust_code=self.trust_code,
            options={key: value for key, value in given.items() if value is not None},
        )


DEFAULTS = Loading()


def load(name: str, cache_dir: Path, options: Loading = DEFAULTS) -> Loaded:
    """Load a model by name or path, by whichever registered loader takes it.

    Args:
        name: Name of a vision model with random weights, or path of a file or folder.
        cache_dir: Folder of models that have names in ``mlsys models list``.
        options: How to load it.

    Raises:
        InvalidInputError: There is no such model, it is damaged, or cannot be cut so.
        MissingDependencyError: It, or what reads it, is not installed.
    """
    context = options.context()
    if name in SHAPES:
        return replace(load_graph(Path(name), context), device=options.device)
    registry = installed_plugins().registry
    path = resolve_model(name, cache_dir) if name == ENCODER else Path(name).expanduser()
    spec = find_loader(path, ENGINE, registry)
    if spec is not None:
        loaded: Loaded = load_with(spec, path, context, registry, kind=Loaded)
        return replace(loaded, name=name if name == ENCODER else loaded.name, device=options.device)
    if (path / "config.json").is_file():
        raise MissingDependencyError(f"{name} is a folder of an encoder: pip install mlsys-encoders")
    if path.suffix in (".pt", ".pth") and path.is_file():
        raise InvalidInputError(
            f"{name!r} is a file of torch.save, which runs code while it loads: load it in Python, then write a .pt2 "
            "with torch.export.save, or serve the module with mlsys_dvabatch.Service"
        )
    raise InvalidInputError(
        f"{name!r} is no model DVABatch knows: give a file or folder with {endings(ENGINE, registry)}, or one of "
        f"{', '.join(sorted([*SHAPES, ENCODER]))}"
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

"""Capture: from a model and example inputs to a :class:`~mlsys_nimble.ir.program.Program`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from mlsys_nimble.capture.aliases import write
from mlsys_nimble.capture.draws import Draws
from mlsys_nimble.capture.encoders import padding_as_in_eager
from mlsys_nimble.capture.layouts import copied
from mlsys_nimble.capture.leaks import LeakGuard
from mlsys_nimble.capture.results import Results, find_results
from mlsys_nimble.capture.sources import Site, current_site, site_of_node
from mlsys_nimble.capture.tracer import Tracer
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.errors import CaptureError, call_external, refuse
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.program import Program
from mlsys_nimble.modes import modes_restored


@dataclass(frozen=True, slots=True)
class Captured:
    """Program, with the mapping of a call's arguments and results to its inputs and outputs."""

    program: Program
    tensor_indices: tuple[int, ...]  # leaves of (args, kwargs) that are the program's inputs, in order
    results: Results
    device: torch.device
    reads_values: bool  # the model's Python code read values of constants
    strides: Literal["any", "rows", "exact"]  # input strides it is valid for; "rows": row-major ones
    draws: Draws  # random numbers that the run drew


def capture(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fixed_indices: Collection[int] = (),
    separates: bool = True,
    questions: Questions | None = None,
) -> Captured:
    """Capture the program of ``model(*args, **kwargs)`` by running it once on copies of the example inputs.

    Tensors among the arguments, in any pytree, become the program's inputs, in flattened order; everything else is
    fixed. Parameters, buffers and tensors that the model holds become constants, by reference. Changes in place
    are undone before this returns, and listed in :attr:`Program.mutations`.

    Args:
        model: Function of tensors, or a module.
        args: Positional arguments of the example.
        kwargs: Keyword arguments of the example.
        fixed_indices: Indices of argument leaves whose tensors belong to the model.
        separates: True makes every result an output of its own, even one that shares memory with others in eager.
        questions: Filled with what the model's Python code asks about sizes; None: it gets plain integers.

    Raises:
        CaptureError: the model cannot be scheduled ahead of time; the message names the operator and the line.

    Example:
        >>> print(capture(torch.nn.ReLU(), (torch.zeros(2, 3),)).program)
        %0: float32[2, 3] = input
        %1: float32[2, 3] = Pointwise(steps=(Step(op='relu', arguments=(0,)),), dtype='float32')(%0)  # relu
        return %1
    """
    flat = trees.flatten((tuple(args), dict(kwargs or {})))
    leaves = list(flat.leaves)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    indices = tuple(index for index in tensors if index not in fixed_indices)
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    device = _single_device(model, [leaves[index] for index in tensors])
    node_site = _NodeSites(model) if isinstance(model, torch.fx.GraphModule) and not kwargs else None
    paths = {id(module): path for path, module in modules.items()}
    site = node_site.site if node_site else lambda: current_site(paths)
    own = [*(tensor for _, tensor in _tensor_attributes(modules).values()), *(leaves[index] for index in tensors)]
    own += [
        parameter for module in modules.values() for parameter in module._parameters.values() if parameter is not None
    ]
    tracer = Tracer(device, site, own, questions=questions)
    run: Callable[..., Any] = node_site.run if node_site else model
    # Generators are restored afterwards, so that the first replay draws what eager draws.
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with generators, torch.inference_mode(), modes_restored(), traceable(), _attributes_restored(modules) as before:
        for index in indices:
            leaves[index] = copied(leaves[index].detach())
        # The run must not write to the caller's arrays.
        leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        inputs = [tracer.add_input(leaves[index]) for index in indices]
        if questions is not None:  # dynamo passes sizes as arguments
            leaves = [questions.wrapped(leaf) if type(leaf) is int else leaf for leaf in leaves]
        objects: list[Any] = []
        call = trees.unflatten(leaves, flat.spec, objects)
        given = _Given(call, objects)
        try:
            with LeakGuard(tracer, site, questions), tracer:
                result = call_external(run, *call[0], **call[1])
            tracer.caught.check()
            _refuse_elsewhere(result, device, tracer.beside)
            tracer.draws.check()
            results, outputs = find_results(result, objects, given.changed(), tracer, inputs, separates=separates)
            _note_reassigned(before, modules, tracer)
            held = [each for each in trees.flatten((result, objects)).leaves if isinstance(each, torch.Tensor)]
            is_bound = tracer.depends_on_strides(held) or any(each.kind == "input" for each in results.origins)
        except NotImplementedError as error:
            if "HigherOrderOperator" not in str(error):
                raise
            what = f"an operator that takes functions or has effects: {str(error).partition(' and mode ')[0]}"
            raise refuse(what, site().source, "Prepare with fallback='eager' to run that part eagerly.") from error
        finally:
            tracer.caught.first = None  # its traceback holds tensors
            tracer.restore()
            tracer.draws.restore()
    if node_site is None:
        del result, call, given, objects, leaves, before, held
        _refuse_kept(tracer)
    builder = tracer.builder
    program = Program(
        values=tuple(builder.values),
        operators=tuple(builder.operators),
        inputs=tuple(ref.value for ref in inputs),
        outputs=tuple(ref.value for ref in outputs),
        constants=builder.constants,
        mutations=tuple((old.value, new.value) for old, new in tracer.mutations()),
    )
    is_bound = is_bound or any(old in program.inputs for old, _ in program.mutations)
    strides: Literal["any", "rows", "exact"] = "exact" if tracer.asks_strides else "rows" if is_bound else "any"
    return Captured(program, indices, results, device, tracer.reads_values, strides, tracer.draws)


def _refuse_kept(tracer: Tracer) -> None:
    """Refuse a model of whose run a tensor is left over: in a list, or a dictionary that a hook fills."""
    if tracer.kept():
        gc.collect()
        if tracer.kept():
            what = "forward, or a hook, keeps a tensor that it has computed from inputs"
            advice = "A replay would not: return the tensor, or prepare with fallback='eager'."
            raise refuse(what, tracer.kept()[0], advice)


def _refuse_elsewhere(result: Any, device: torch.device, beside: Sequence[torch.Tensor]) -> None:
    for leaf in torch.utils._pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.device != device and not any(leaf is other for other in beside):
            what = f"forward returns a tensor on {leaf.device}, the model lies on {device}"
            raise refuse(what, "", "Move the result after the call, or prepare with fallback='eager'.")


class _Given:
    """Arguments of forward, and their state before the run."""

    def __init__(self, call: Any, objects: Sequence[Any]) -> None:
        self._call, self._objects = call, objects
        self._known = {id(item): number for number, item in enumerate(objects)}
        self._before = self._states()

    def changed(self) -> list[int]:
        """Return the numbers of the objects that forward has changed.

        Raises:
            CaptureError: forward has changed a list or dictionary.
        """
        (call, *objects), (call_before, *before) = self._states(), self._before
        if not _is_same(call, call_before):
            advice = "Return a new one, or prepare with fallback='eager'."
            raise refuse("forward changes a list or dictionary that it was given", "", advice)
        pairs = enumerate(zip(objects, before, strict=True))
        return [number for number, (now, then) in pairs if not _is_same(now, then)]

    def _states(self) -> list[trees.Flat]:
        states = [self._call, *map(trees.attributes_of, self._objects)]
        return [trees.flatten(state, self._known) for state in states]


def _is_same(one: trees.Flat, other: trees.Flat) -> bool:
    if one.spec != other.spec or len(one.leaves) != len(other.leaves):
        return False
    pairs = zip(one.leaves, other.leaves, strict=True)
    return all(a is b or trees.key_of(a, id) == trees.key_of(b, id) for a, b in pairs)


def _single_device(model: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the one device of a model and its inputs."""
    named = list(tensors)
    if isinstance(model, nn.Module):
        named += [*model.parameters(), *model.buffers()]
    devices = list(dict.fromkeys(tensor.device for tensor in named))
    if len(devices) > 1:
        listed = " and ".join(map(str, devices))
        raise CaptureError(f"the model and its inputs lie on {listed}. Nimble schedules one device: move them to one.")
    return devices[0] if devices else torch.device("cpu")


@contextmanager
def traceable() -> Iterator[None]:
    """Tell model code that it is being compiled, and turn off torch's fused encoder layers."""
    compiler: Any = torch.compiler
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    fastpath = torch.backends.mha.get_fastpath_enabled()
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with padding_as_in_eager(is_fast=fastpath):
            yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = flags
        torch.backends.mha.set_fastpath_enabled(fastpath)


_TensorAttributes = dict[tuple[str, str], tuple[dict[str, Any], Any]]


def _tensor_attributes(modules: Mapping[str, nn.Module]) -> _TensorAttributes:
    """Map (module path, attribute) to (the dictionary that holds it, the tensor)."""
    return {
        (path, name): (held, value)
        for path, module in modules.items()
        for held in (module._buffers, module.__dict__)
        for name, value in held.items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def _attributes_restored(modules: Mapping[str, nn.Module]) -> Iterator[_TensorAttributes]:
    """Undo what forward assigns to tensor attributes; yield what they held before."""
    before = _tensor_attributes(modules)
    others = {id(held): {**held} for module in modules.values() for held in (module._buffers, module.__dict__)}
    try:
        yield before
    finally:
        for key, (held, _) in _tensor_attributes(modules).items():
            if key not in before:
                held.pop(key[1])
                held.update((name, value) for name, value in others[id(held)].items() if name == key[1])
        for (_, name), (held, tensor) in before.items():
            held[name] = tensor


def _note_reassigned(before: _TensorAttributes, modules: Mapping[str, nn.Module], tracer: Tracer) -> None:
    """Record ``self.state = f(self.state)`` as a mutation of the old tensor; refuse a computed state without one."""
    for key, (_, tensor) in _tensor_attributes(modules).items():
        old = before.get(key, (None, None))[1]
        if tensor is old:
            continue
        name = ".".join(filter(None, key))
        if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
            new, _ = tracer.ref(tensor), tracer.ref(old)
            write(tracer.member(old), new, tracer.builder)
        elif not tracer.is_fixed(tensor):
            advice = "Register a buffer of that shape (self.state.copy_(new)), or prepare with fallback='eager'."
            raise refuse(f"forward assigns a new tensor to the attribute {name}", "", advice)


_REGIONS: Any = (torch._C._InferenceMode, torch.autocast)


class _NodeSites(torch.fx.Interpreter):
    """Interpreter of a graph module that knows the source line of the node that runs."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._node: torch.fx.Node | None = None
        self._sites: dict[torch.fx.Node, Site] = {}
        self._has_gradients: bool = module.meta.get("has_gradients", False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph in the modes of its trace; close the regions that it has opened if it stops midway."""
        torch._C._set_grad_enabled(self._has_gradients)  # dynamo leaves out of a graph what is on already
        torch._C._set_fwd_grad_enabled(self._has_gradients)
        try:
            return super().run(*args, **kwargs)
        finally:  # values that are still needed are of regions left open: inference mode, autocast
            for value in reversed([*self.env.values()]):
                if isinstance(value, _REGIONS):
                    value.__exit__(None, None, None)
            self.env.clear()

    def run_node(self, n: torch.fx.Node) -> Any:
        """Remember the node and run it."""
        self._node = n
        return call_external(super().run_node, n)

    def site(self) -> Site:
        """Return the site of the node that runs."""
        if self._node is None:
            return Site()
        if self._node not in self._sites:
            self._sites[self._node] = site_of_node(self._node)
        return self._sites[self._node]

"""Recorder of what a model dispatches in one run on example inputs: the paper's pre-run (section 3.3.1).

A dispatch mode sees every operator with real tensors, below autograd and, in inference mode, before composite operators
are decomposed: ``linear`` arrives whole. Each is executed, so that shapes, dtypes and shared memory are facts, and
handed to a rule. What the model changes in place is restored when the trace ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from mlsys_nimble.capture.aliases import Group, Member, overlap, read, shares_memory, steps_between, write
from mlsys_nimble.capture.builder import Builder, Ref, dtype_name, type_of
from mlsys_nimble.capture.dispatched import (
    STATIC_CHECKS,
    Written,
    as_aten,
    as_functional,
    checked,
    declared,
    has_overlaps,
    is_tensor,
    is_whole,
    is_write,
    read_values,
    reads_what_it_writes,
    refuse_unplanned,
    tensors_of,
    view_of,
)
from mlsys_nimble.capture.draws import Draws
from mlsys_nimble.capture.layouts import Kin, depends_on_strides
from mlsys_nimble.capture.rules import apply_rule, find_rule
from mlsys_nimble.capture.sources import Site
from mlsys_nimble.capture.watched import Questions, ask_cuts
from mlsys_nimble.errors import Caught, call_external, refuse
from mlsys_nimble.ir.operators import Copy
from mlsys_nimble.modes import Casts

BRANCH = (
    "A schedule is fixed ahead of time: replace the branch by torch.where, pass the number as an argument of forward, "
    "or prepare with fallback='eager'."
)
_CHECK = "A replay would not look: check inputs before the call, or prepare with fallback='eager'."
CUSTOM = "Register the kernel as an operator, torch.library.custom_op or triton_op, or prepare with fallback='eager'."
_SHAPE = "Use a mask of fixed shape in its place, or prepare with fallback='eager'."


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operators into :attr:`builder`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: the base class would import TorchDynamo, most of a first preparation's time, to keep it out."""
        return False

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:  # a compiled function may be at work: then it must be kept out
            _keep_dynamo_out()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __init__(
        self,
        device: torch.device,
        site: Callable[[], Site],
        own: Iterable[torch.Tensor] = (),
        *,
        questions: Questions | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._questions = questions
        self._own = {id(tensor) for tensor in own}  # tensors of the model or the caller, which outlive the run
        self.builder = Builder(device, is_general=questions is not None)
        self._device = device
        self.draws = Draws(device)
        self.casts = Casts(device)
        self._site = site
        self._members = WeakIdKeyDictionary()
        self._roots: list[tuple[torch.Tensor, Group, Ref]] = []  # inputs and constants
        self.reads_values = False  # Python code read a constant's value, so the program depends on it
        self.asks_strides = False  # Python code read strides of a tensor computed from inputs
        self._unsure: list[Kin] = []  # kin of tensors that are views for some strides alone
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # constants written in place, with their old content
        self.beside: list[torch.Tensor] = []  # CPU tensors made by operators whose results lie on the device
        self.caught = Caught()
        self._is_lifting = False  # torch.tensor(numbers) is at work: its tensor appears here first

    def add_input(self, tensor: torch.Tensor) -> Ref:
        """Make ``tensor`` an input of the program."""
        return self._add_root(tensor, self.builder.new_value(type_of(tensor)))

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Return the value that ``tensor`` holds now; a tensor never seen before becomes a constant."""
        member: Member | None = self._members.get(tensor)  # type: ignore[no-untyped-call]
        if member is None:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                what = f"a tensor of class {type(tensor).__name__}"
                is_lazy = nn.parameter.is_lazy(tensor)
                advice = "Nimble takes plain tensors, parameters and buffers."
                raise refuse(what, self.builder.site.source, "Call the model once before." if is_lazy else advice)
            if tensor.device != self._device and tensor.dim() and not self._is_fresh(tensor):
                what = f"a tensor on {tensor.device} beside tensors on {self._device}"
                raise refuse(what, self.builder.site.source, "Nimble schedules one device: move the tensor there.")
            return self._add_constant(tensor)
        return read(member, self.builder)

    def member(self, tensor: torch.Tensor) -> Member:
        """Return the group of a known tensor, and its steps from the base."""
        found: Member = self._members[tensor]
        return found

    def roots(self) -> list[tuple[torch.Tensor, Ref]]:
        """Return inputs and constants, each with its initial value."""
        return [(tensor, ref) for tensor, _, ref in self._roots]

    def root_of(self, member: Member) -> Ref | None:
        """Return the input or constant that a member shares memory with; None if an operator made the memory."""
        return next((ref for _, group, ref in self._roots if group is member.group), None)

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor depends on constants alone."""
        return self.builder.is_fixed(self.ref(tensor))

    def may_share(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Record that for other strides of the inputs a result might share memory with its source, or not."""
        one, other = self._members.get(source), self._members.get(result)  # type: ignore[no-untyped-call]
        if one is not None and other is not None and not self.builder.is_fixed(one.ref):
            one.group.kin.join(other.group.kin)
            self._unsure.append(one.group.kin)

    def depends_on_strides(self, results: Iterable[torch.Tensor]) -> bool:
        """Return whether other strides of the inputs may change what is written, or which results share memory."""
        roots = [group.kin for _, group, _ in self._roots]
        return depends_on_strides(self._unsure, [*roots, *(self._members[each].group.kin for each in results)])

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is an input, or was computed from one."""
        member = self._members.get(tensor)  # type: ignore[no-untyped-call]
        return member is not None and not self.builder.is_fixed(member.ref)

    def kept(self) -> list[str]:
        """Return the sources of the tensors, computed from inputs, that something else still holds."""
        given = {id(tensor) for tensor, _, _ in self._roots}
        alive = [tensor for tensor in self._members if id(tensor) not in given and self.is_computed(tensor)]
        producers = [self.builder.producer(self._members[tensor].ref) for tensor in alive]
        return [producer.source if producer else "" for producer in producers]

    def mutations(self) -> list[tuple[Ref, Ref]]:
        """Return inputs and constants that were written in place, each with the value that it holds now."""
        return [(ref, group.base) for _, group, ref in self._roots if group.version]

    def restore(self) -> None:
        """Put back what the model's own tensors held before."""
        with torch.inference_mode():
            for tensor, saved in reversed(self._saved):
                tensor.copy_(saved)
        self._saved.clear()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record ``func``, then run it; what it does in Python is its own affair, not the model's."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction(), self.caught:
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return self._dispatched(func, args, kwargs)
            with self.draws.drawing((*args, *kwargs.values()), self._site().source):
                return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.builder.site = self._site()
        name = str(func)
        if func.namespace == "profiler":  # record_function: it names a part of the run for a profile
            return call_external(func, *args, **kwargs)
        refuse_unplanned(name, args, self.builder.site.source)
        function = declared(func, args, kwargs, self.builder.site.source)
        if function is not None:
            with self:
                return function(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._run_view_in_place(func, name, args, kwargs)
        if any(map(is_write, func._schema.arguments)):
            return self._run_written(func, name, args, kwargs)
        self._refuse_data_dependence(func, name, args, kwargs)
        rule = find_rule(name)
        if rule is None and func._can_decompose() and not is_whole(func, args):
            return self._run_in_parts(func, args, kwargs)
        self._is_lifting = name.startswith("aten.lift_fresh")
        refs = self._refs(args), self._refs(kwargs)
        tensors = tensors_of((args, kwargs))
        if self._questions is not None and tensors:
            ask_cuts(self._questions, name, tuple(tensors[0].shape), args[1:])
        if rule is None:
            result = checked(func, args, dict(kwargs), tensors, self.builder.site.source)
        else:
            result = call_external(func, *args, **kwargs)
        self._refuse_elsewhere(func, name, result, tensors)
        if isinstance(result, torch.Tensor | list | tuple):
            self._record(func, name, result, refs, tensors)
        elif result is None and not all(map(self.is_fixed, tensors)) and not name.startswith(STATIC_CHECKS):
            raise refuse(f"{name} looks at values and gives none", self.builder.site.source, _CHECK)
        return result

    def _record(self, func: Any, name: str, result: Any, refs: tuple[Any, Any], tensors: list[torch.Tensor]) -> None:
        single = isinstance(result, torch.Tensor)
        results = [result] if single else [part for part in result if part is not None]  # a gradient not asked for
        if not all(isinstance(tensor, torch.Tensor) for tensor in results):
            raise refuse(f"{name} returns more than tensors", self.builder.site.source, "Keep it out of the model.")
        types = [type_of(tensor, self.builder.site.source) for tensor in results]
        made = self._emit(func, types, refs, tensors, single=single)
        for tensor, ref in zip(results, made, strict=True):
            self._track(tensor, ref, tensors)

    def _emit(
        self, func: Any, types: list[Any], refs: tuple[Any, Any], tensors: list[torch.Tensor], *, single: bool
    ) -> list[Ref]:
        """Emit one dispatched operator by its rule, or else as one that torch runs."""
        rule = find_rule(str(func))
        if rule is not None:
            made = apply_rule(rule, self.builder, types[0] if single else types, *refs)
            made = [made] if single else made
            if made is not NotImplemented and [getattr(ref, "type", None) for ref in made] == types:
                return list(made)
        kind, inputs = as_aten(func, refs, tensors, self._device)
        is_pure = torch.Tag.nondeterministic_seeded not in func.tags
        return self.builder.emit_many(kind, inputs, types, is_pure=is_pure)

    def _run_in_parts(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self, self.casts.of_parts(func):
            return call_external(func.decompose, *args, **kwargs)

    def _run_written(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``x.add_(y)`` or ``add(x, y, out=x)`` as ``add(x, y)``, written to x and to what shares its memory."""
        site = self.builder.site.source
        call = as_functional(func, args, kwargs)
        if call is None:
            if func._can_decompose() and not is_whole(func, args):
                return self._run_in_parts(func, args, kwargs)
            raise refuse(f"{name} changes its arguments in place", site, "Use an operator that returns a new tensor.")
        self._refuse_data_dependence(call.function, name, call.args, call.kwargs)
        is_list = name.startswith("aten._foreach_") and len(args[0]) > 1
        if is_list and has_overlaps(call.targets, tensors_of((args, kwargs))):
            for number in range(len(args[0])):  # torch takes one after the other
                with self:
                    func(*[[each[number]] if isinstance(each, list | tuple) else each for each in args], **kwargs)
            return None
        if reads_what_it_writes(func, args, kwargs, call.targets):
            what = f"{name} reads memory that it writes to"
            raise refuse(what, site, "Copy what it reads: y.clone(), or prepare with fallback='eager'.")
        before = [self.ref(target).type for target in call.targets]
        news = self._run_functional(call)
        for target in call.targets:
            self._save(target)
        returned = call_external(func, *args, **kwargs)
        if [type_of(target, site) for target in call.targets] != before:
            raise refuse(f"{name} changes the shape of its argument", site, "Make a new tensor in its place.")
        for target, new in zip(call.targets, news, strict=True):
            new = self.builder.cast(new, dtype_name(target.dtype))
            write(self._members[target], self.builder.expand(new, tuple(target.shape)), self.builder)
        return returned

    def _run_view_in_place(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``x.transpose_(0, 1)``: from now on x is the view ``x.transpose(0, 1)``."""
        target, *rest = args
        view = view_of(func)
        self.ref(target)
        if view is None or any(root is target for root, _, _ in self._roots):
            what = f"{name} changes the shape of an argument or weight" if view else f"{name} changes its argument"
            raise refuse(what, self.builder.site.source, "Use an operator that returns a new tensor.")
        with self:
            seen = call_external(view, target, *rest, **kwargs)
        member: Member = self._members[seen]
        returned = call_external(func, *args, **kwargs)
        self._members[target] = replace(member)
        return returned

    def _run_functional(self, call: Written) -> list[Ref]:
        """Return the values that a call writes, in the dtypes that it computes in."""
        function = call.function
        if find_rule(str(function)) is None and function._can_decompose() and not is_whole(function, call.args):
            with self:
                results = call_external(function, *call.args, **call.kwargs)
            return [self.ref(result) for result in ([results] if is_tensor(results) else results)]
        refs = self._refs(call.args), self._refs(call.kwargs)
        made = call_external(function, *call.args, **call.kwargs)
        results = [made] if is_tensor(made) else list(made)
        types = [type_of(result, self.builder.site.source) for result in results]
        return self._emit(function, types, refs, tensors_of((call.args, call.kwargs)), single=is_tensor(made))

    def _track(self, tensor: torch.Tensor, ref: Ref, arguments: list[torch.Tensor]) -> None:
        """Record which value a result is, and which argument's memory it shares."""
        if tensor in self._members:  # an argument itself
            return
        parent = next((argument for argument in arguments if shares_memory(argument, tensor)), None)
        if parent is None:
            if any(self._members[each].ref == ref for each in arguments):  # a copy for which the rule emitted nothing
                ref = self.builder.emit(Copy(), [ref], ref.type)
            self._members[tensor] = Member(Group(ref), (), ref)
            return
        member = self._members[parent]
        steps = member.steps + steps_between(read(member, self.builder), ref, self.builder)
        self._members[tensor] = Member(member.group, steps, ref, member.group.version)

    def _add_constant(self, tensor: torch.Tensor) -> Ref:
        """Add a tensor of the model, or one that each call makes from numbers, such as ``torch.tensor([1.0])``."""
        if any(group.version and shares_memory(root, tensor) for root, group, _ in self._roots):
            what = "a read of memory that was written to in place through another parameter or buffer"
            raise refuse(what, self.builder.site.source, "Give each a tensor of its own: buffer.clone().")
        if not self._is_fresh(tensor):
            return self._add_root(tensor, self.builder.constant(tensor))
        if any(overlap(tensor, other) for other in list(self._members.keys())):  # type: ignore[no-untyped-call]
            what = "memory of a tensor that was reached behind torch's back, as by DLPack"
            raise refuse(what, self.builder.site.source, "Keep to torch's operators between inputs and results.")
        is_owned = not tensor.untyped_storage().resizable()  # memory of NumPy, say: writes must reach its owner
        if (is_owned and tensor.device != self._device) or (tensor.is_cuda and not self._is_lifting):
            what = "a tensor that was made behind torch's back, as by a kernel outside of torch or from NumPy's memory"
            raise refuse(what, self.builder.site.source, CUSTOM)
        if is_owned:
            return self._add_root(tensor, self.builder.constant(tensor))
        fixed = self.builder.constant(tensor.to(self._device, copy=True))
        ref = self.builder.emit(Copy(), [fixed], fixed.type)
        self._members[tensor] = Member(Group(ref), (), ref)
        return ref

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that no operator made is of this run, such as ``torch.tensor([1.0])``."""
        return tensor.is_inference() and id(tensor) not in self._own

    def _add_root(self, tensor: torch.Tensor, ref: Ref) -> Ref:
        group = Group(ref)
        self._members[tensor] = Member(group, (), ref)
        self._roots.append((tensor, group, ref))
        return ref

    def _save(self, target: torch.Tensor) -> None:
        """Keep the content of a tensor that the model owns, before the first write to it."""
        if self._members[target].group.version:
            return
        roots = [root for root in self._roots if shares_memory(root[0], target)]
        if any(torch._debug_has_internal_overlap(root) == 1 for root, _, _ in roots):
            what = "a write in place to an argument or buffer whose elements share memory (expand)"
            raise refuse(what, self.builder.site.source, "Give it elements of their own: x.clone().")
        if len(roots) > 1:
            what = "a write in place to memory that several parameters, buffers or inputs share"
            raise refuse(what, self.builder.site.source, "Give each a tensor of its own: buffer.clone().")
        self._saved.extend((tensor, tensor.clone()) for tensor, _, ref in roots if self.builder.is_fixed(ref))

    def _refs(self, tree: Any) -> Any:
        return tree_map_only(torch.Tensor, self.ref, tree)

    def _refuse_data_dependence(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse an operator that makes the program depend on the values of its inputs."""
        tensors = read_values(func, args, kwargs)
        if tensors is None:
            return
        if all(self.is_fixed(tensor) for tensor in tensors):
            self.reads_values = True
            return
        site = self.builder.site.source
        if torch.Tag.data_dependent_output in func.tags:
            what = f"{name}: the model's Python code asks for the value of a tensor computed from inputs"
            raise refuse(what, site, BRANCH)
        raise refuse(f"{name}: the shape of its result depends on values", site, _SHAPE)

    def _refuse_elsewhere(self, func: Any, name: str, result: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse what lies on another device; what constants alone give there is made on the program's own."""
        parts = tensors_of(result)
        away = [part for part in parts if part.device != self._device]
        if len(away) < len(parts) or not away:
            self.beside += away  # attention on CUDA keeps its seeds on the CPU; a graph, on the device
            return
        place = away[0].device
        if torch.Tag.nondeterministic_seeded in func.tags:
            what = f"{name} draws random numbers on {place}, the model lies on {self._device}"
            raise refuse(what, self.builder.site.source, "Draw them on the model's device: device=x.device.")
        if not all(map(self.is_fixed, tensors)):
            what = f"{name} moves a tensor computed from inputs to {place}"
            advice = "Nimble schedules one device: move results after the call, or prepare with fallback='eager'."
            raise refuse(what, self.builder.site.source, advice)


@cache
def _keep_dynamo_out() -> None:
    """Have TorchDynamo never compile the recording of an operator, from now on."""
    Tracer.__torch_dispatch__ = torch._disable_dynamo(Tracer.__torch_dispatch__)  # type: ignore[method-assign, attr-defined]

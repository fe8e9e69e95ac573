"""Prepared calls: one for each set of input shapes, made on first use; a bounded number is kept."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.capture.general import refuse_unwatched
from mlsys_nimble.capture.layouts import layout_of
from mlsys_nimble.capture.repeat import capture_checked
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.errors import refuse, refuse_or_blame
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.operators import Aten, Convolution, Dequantise, Linear, Pointwise, Quantise
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.ir.sizes import NotGeneral
from mlsys_nimble.options import Options
from mlsys_nimble.prepared import Prepared
from mlsys_nimble.ranged import Ranged, RangedCalls, Ranges
from mlsys_nimble.state.forks import CAPTURE_LOCK, renew_in_forks

_LOG = logging.getLogger("mlsys_nimble")
_CHANGED = (
    "the model was changed after it was prepared, so it was prepared again. Where that is often, prepare it with "
    "training=True, which reads weights at every call."
)


_QUANTISED = (
    "the model is quantised, but %d of its products run in float32 on rounded values%s. Products of whole numbers need "
    "int8 weights whose zero points are 0, by tensor or by output channel, and constant biases"
)


class PreparedCalls:
    """Prepared calls of one model, by the signature of their arguments."""

    def __init__(
        self,
        model: Callable[..., Any],
        options: Options,
        *,
        fixed_indices: Collection[int] = (),
        in_eval_mode: bool = False,
    ) -> None:
        self._model = model
        self._options = options
        self._fixed_indices = frozenset(fixed_indices)
        self._mode = eval_mode if in_eval_mode else nullcontext
        self._by_signature: OrderedDict[Any, Prepared] = OrderedDict()
        self._has_warned = False
        self.latest: Prepared | None = None
        self.ranged: RangedCalls[Prepared] | None = None  # calls of many sizes that one preparation serves
        self.renew()
        renew_in_forks(self)

    def serve(self, ranges: Ranges) -> None:
        """Serve all calls within these ranges by one preparation, where one can."""

        def make(captured: Captured, ranged: Ranged) -> Prepared:
            with faults_refused():
                prepared = self._told(Prepared(captured, self._options, self._model, ranged=ranged))
            sizes = ", ".join(f"{name} of {least} to {most}" for name, (least, most) in ranges.bounds.items())
            _LOG.info("prepared %s: %d operators; %s", sizes, len(prepared.program.operators), prepared.watch)
            return prepared

        self.ranged = RangedCalls(ranges, self._capture_at, make)

    def renew(self) -> None:
        """Make new locks: no call is running."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_signature)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._by_signature.clear()
            self.latest = None
            if self.ranged:
                self.ranged.clear()

    def refresh(self) -> bool:
        """Compare every byte that schedules have copied; forget all schedules and return True if one has changed."""
        has_changed = any(prepared.has_changed(looks_at_all=True) for prepared in self.all)
        if has_changed:
            self.clear()
        return has_changed

    @property
    def all(self) -> list[Prepared]:
        """Return all that is prepared, the one unused for longest first."""
        with self._lock:
            return [*self._by_signature.values(), *(self.ranged.all if self.ranged else ())]

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replay the call; prepare it first if its signature is new."""
        signature, inputs, objects = self._keyed(args, kwargs)
        for tensor in inputs:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(
                    "an input requires a gradient, and what Nimble replays has none. Call under torch.no_grad(), "
                    "or pass input.detach()."
                )
        prepared = self._by_signature.get(signature) or self._find(signature, args, kwargs)
        if prepared.strides != "any":
            layout = layout_of(inputs, is_exact=prepared.strides == "exact")
            if layout != prepared.made_for:
                signature = signature, layout
                prepared = self._by_signature.get(signature) or self._prepare(signature, args, kwargs)
        if prepared.has_changed():
            self.clear()
            prepared = self._find(signature, args, kwargs)
            _LOG.info("%s", _CHANGED)
        if prepared is not self.latest:
            with self._lock:
                if signature in self._by_signature:
                    self._by_signature.move_to_end(signature)
                self.latest = prepared
        if torch._C._is_any_autocast_enabled():  # the schedule holds its casts
            with torch._C._DisableAutocast():
                return prepared.run(inputs, objects)
        return prepared.run(inputs, objects)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """Prepare calls of this one's signature, without running it."""
        signature, inputs, _ = self._keyed(args, kwargs)
        prepared = self._find(signature, args, kwargs)
        prepared.check(inputs)
        return prepared

    def _keyed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Sequence[torch.Tensor], Sequence[Any]]:
        """Do as :meth:`_read`, with autocast and another default dtype than float32 in the signature."""
        signature, inputs, objects = self._read(args, kwargs)
        if torch._C._is_any_autocast_enabled():
            signature = signature, autocast_state()
        if torch.get_default_dtype() is not torch.float32:
            signature = signature, torch.get_default_dtype()
        return signature, inputs, objects

    def _read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Sequence[torch.Tensor], Sequence[Any]]:
        """Return the call's signature, the tensors that a replay takes, and the objects among the arguments."""
        if not kwargs and not self._fixed_indices and {*map(type, args)} == {torch.Tensor}:
            return tuple(map(_looks, args)), args, ()
        flat = trees.flatten((args, dict(kwargs)))
        leaves = flat.leaves
        if self._fixed_indices:
            leaves = [leaf for index, leaf in enumerate(leaves) if index not in self._fixed_indices]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return (flat.spec, tuple([trees.key_of(leaf, _looks) for leaf in leaves])), inputs, flat.objects

    def _find(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """Return what serves a call; make it first if need be."""
        is_usual = not torch._C._is_any_autocast_enabled() and torch.get_default_dtype() is torch.float32
        if self.ranged is None or not is_usual:
            return self._prepare(signature, args, kwargs)
        found = self.ranged.known(signature)
        if found is None:
            with self._lock:
                found = self.ranged.find(signature, args, kwargs)
                self.latest = found or self.latest
        return found or self._prepare(signature, args, kwargs)

    def _capture_at(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], questions: Questions, is_first: bool
    ) -> Captured:
        """Capture the model at one of many sizes; the first of them with the checks of any preparation."""
        with CAPTURE_LOCK, self._mode(self._model):
            refuse_unwatched(self._model)
            if is_first:
                return self._capture(tuple(args), kwargs, questions)
            fixed = self._fixed_indices
            return capture(self._model, args, kwargs, fixed_indices=fixed, separates=False, questions=questions)

    def _capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], questions: Questions | None = None
    ) -> Captured:
        fixed = self._fixed_indices
        try:
            if isinstance(self._model, torch.fx.GraphModule):
                return capture(self._model, args, kwargs, fixed_indices=fixed, separates=False, questions=questions)
            return capture_checked(self._model, args, kwargs, questions)
        except MlsysError:
            raise
        except Exception as error:  # the model's own, or one of the capture
            with torch.no_grad():
                run_on_copies(self._model, args, kwargs)
            what, advice = "the model runs, but not when it is watched", "Prepare with fallback='eager'."
            modules = self._model.modules() if isinstance(self._model, torch.nn.Module) else (self._model,)
            if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
                what, advice = "a TorchScript module, which cannot be watched", f"Give what it was made of. {advice}"
            raise refuse_or_blame(error, what, advice) from error

    def _prepare(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        with self._lock:
            if (found := self._by_signature.get(signature)) is not None:  # another thread was faster
                return found
            begin = time.perf_counter()
            with CAPTURE_LOCK, self._mode(self._model):
                captured = self._capture(args, kwargs)
            with faults_refused():
                layout = layout_of(self._read(args, kwargs)[1], is_exact=captured.strides == "exact")
                call = _hollow(args, kwargs)
                prepared = self._told(Prepared(captured, self._options, self._model, call=call, layout=layout))
            self._by_signature[signature] = self.latest = prepared
            dropped = len(self._by_signature) > self._options.max_schedules
            if dropped:
                self._by_signature.popitem(last=False)
            shapes = ", ".join(str(captured.program.values[value]) for value in captured.program.inputs)
            _LOG.info(
                "prepared %s: %d operators, %.2f s; %s; %d of at most %d schedules kept%s",
                shapes or "a call without tensors",
                len(prepared.program.operators),
                time.perf_counter() - begin,
                prepared.watch,
                len(self._by_signature),
                self._options.max_schedules,
                ", the one unused for longest was dropped" if dropped else "",
            )
            return prepared

    def _told(self, prepared: Prepared) -> Prepared:
        """Warn, once, of a model that will not be as fast as it is meant to be."""
        num_floats, num_torch = _rounded(prepared.captured.program, prepared.program)
        if num_floats + num_torch and not self._has_warned:
            self._has_warned = True
            _LOG.warning(_QUANTISED, num_floats, f"; torch runs {num_torch} operators" if num_torch else "")
        return prepared


def _rounded(captured: Program, program: Program) -> tuple[int, int]:
    """Return the number of float products of rounded values, and of quantised operators that torch runs."""
    targets = [each.kind.target for each in program.operators if isinstance(each.kind, Aten)]
    num_torch = sum(target.startswith(("quantized_decomposed.", "aten._int_mm")) for target in targets)
    if not any(isinstance(each.kind, Quantise | Dequantise) for each in captured.operators):
        return 0, num_torch
    producers = {value: operator.kind for operator in program.operators for value in operator.outputs}

    def is_rounded(value: ValueId) -> bool:
        kind = producers.get(value)
        rounds = isinstance(kind, Pointwise) and any(step.op == "round" for step in kind.steps)
        return rounds or isinstance(kind, Dequantise)

    products = [each for each in program.operators if isinstance(each.kind, Convolution | Linear)]
    return sum(is_rounded(each.inputs[0]) for each in products), num_torch


def _hollow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> trees.Flat | None:
    """Return a call's arguments, flattened, with tensors that have no memory; None under autocast."""
    if torch._C._is_any_autocast_enabled():
        return None
    flat = trees.flatten((args, dict(kwargs)))
    flat.leaves = [torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    flat.objects = []
    return flat


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return for CPU and CUDA whether autocast is on, and the dtype that it casts to."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put all modules in eval mode within the context."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def faults_refused() -> Iterator[None]:
    """Refuse a model on which passes or executors fail, so that ``fallback="eager"`` and torch.compile can go on."""
    try:
        yield
    except (MlsysError, NotGeneral):
        raise
    except Exception as error:
        what = "no schedule can be made"
        raise refuse_or_blame(error, what, "Prepare with fallback='eager'.") from error


def run_on_copies(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a model eagerly on copies of the tensors."""
    flat = trees.flatten((args, dict(kwargs)))
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    copied_args, copied_kwargs = trees.unflatten(leaves, flat.spec)
    return model(*copied_args, **copied_kwargs)


def _looks(tensor: torch.Tensor) -> Any:
    """Return the properties by which a schedule fits a tensor."""
    try:
        return tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:
        if not tensor.is_nested:
            raise
    raise refuse("a nested tensor as an argument", "", "Pass a padded tensor and a mask: nested.to_padded_tensor(0.0).")

"""Prepared calls: one for each set of input shapes, made on first use; a bounded number is kept."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError

from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.capture.general import refuse_unwatched
from mlsys_nimble.capture.layouts import layout_of
from mlsys_nimble.capture.refusals import capture_or_refuse, eval_mode, faults_refused
from mlsys_nimble.capture.signatures import hollow, read
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.modes import unusual_modes, without_modes
from mlsys_nimble.options import Options
from mlsys_nimble.prepared import Prepared
from mlsys_nimble.ranged import Ranged, RangedCalls, Ranges
from mlsys_nimble.state.forks import CAPTURE_LOCK, renew_in_forks

_LOG = logging.getLogger("mlsys_nimble")
_CHANGED = (
    "the model was changed after it was prepared, so it was prepared again. Where that is often, prepare it with "
    "training=True, which reads weights at every call."
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
        signature, inputs, objects = read(args, kwargs, self._fixed_indices)
        modes = unusual_modes()
        if modes:
            signature = signature, modes
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
        if modes:
            with without_modes():
                return prepared.run(inputs, objects)
        return prepared.run(inputs, objects)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """Prepare calls of this one's signature, without running it."""
        signature, inputs, _ = read(args, kwargs, self._fixed_indices)
        modes = unusual_modes()
        prepared = self._find((signature, modes) if modes else signature, args, kwargs)
        prepared.check(inputs)
        return prepared

    def _find(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """Return what serves a call; make it first if need be."""
        if self.ranged is None or unusual_modes():
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
                return capture_or_refuse(self._model, tuple(args), kwargs, self._fixed_indices, questions)
            fixed = self._fixed_indices
            return capture(self._model, args, kwargs, fixed_indices=fixed, separates=False, questions=questions)

    def _prepare(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        with self._lock:
            if (found := self._by_signature.get(signature)) is not None:  # another thread was faster
                return found
            begin = time.perf_counter()
            with CAPTURE_LOCK, self._mode(self._model):
                captured = capture_or_refuse(self._model, args, kwargs, self._fixed_indices)
            with faults_refused():
                layout = layout_of(read(args, kwargs, self._fixed_indices)[1], is_exact=captured.strides == "exact")
                call = hollow(args, kwargs)
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
        if not self._has_warned and (warning := prepared.warning):
            self._has_warned = True
            _LOG.warning("%s", warning)
        return prepared

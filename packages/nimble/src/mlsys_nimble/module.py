"""``Nimble``: a module that replays its model's schedule; the paper's two lines (section 3.5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import facts_html
from torch import nn

from mlsys_nimble.calls import PreparedCalls
from mlsys_nimble.capture.refusals import eval_mode
from mlsys_nimble.errors import CaptureError, CaughtError, refuse
from mlsys_nimble.options import Options, make_options
from mlsys_nimble.prepared import Prepared
from mlsys_nimble.ranged import Ranges, parse_ranges

if TYPE_CHECKING:
    from mlsys_nimble.training.calls import TrainedModel, TrainingCalls

_LOG = logging.getLogger("mlsys_nimble")


class Nimble(nn.Module):
    """Model with schedules made ahead of time.

    If its weights, submodules or plain attributes have changed, the next call prepares it again. Results carry no
    gradients, unless it was prepared with ``training=True``. Calls from several threads take turns, unless
    ``max_concurrency`` was raised. Copies, pickled ones too, make schedules of their own when they are first called.

    Example:
        >>> model = Nimble(nn.Sequential(nn.Linear(4, 2), nn.ReLU())).prepare(torch.zeros(1, 4), executor="reference")
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._how: How | None = None
        self._disarm()

    def prepare(
        self,
        example_inputs: Any,
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        training: bool = False,
        fallback: Literal["error", "eager"] = "error",
        dynamic: Mapping[Any, Mapping[int, Any]] | None = None,
        **options: Any,
    ) -> Self:
        """Make the schedule for inputs of these shapes; others are prepared on first use.

        Args:
            example_inputs: Positional arguments of a call, in a tuple or list; or its only one.
            example_kwargs: Keyword arguments of the call.
            training: True schedules forward and backward passes: results carry gradients, parameters and buffers are
                read at every call, and the model's own modes (``train()``, ``eval()``) decide what is computed.
            fallback: Treatment of a model that no schedule can hold: ``"error"`` names the operator and the line;
                ``"eager"`` runs only that part eagerly, through graph breaks of torch.compile.
            dynamic: Sizes that vary between calls, ``{argument: {dimension: (least, most)}}``, by name or position; one
                preparation serves all of them, where one can. ``(name, least, most)`` and ``torch.export.Dim`` give
                sizes that are always equal one name.
            **options: Fields of :class:`~mlsys_nimble.options.Options`, such as ``executor``, ``num_threads``,
                ``max_schedules`` and ``max_concurrency``.

        Raises:
            CaptureError: the model cannot be scheduled ahead of time, and ``fallback`` is ``"error"``.
            InvalidInputError: an option does not exist, or not with this value.
        """
        if fallback not in ("error", "eager"):
            raise InvalidInputError(f"fallback is {fallback!r}; it must be 'error' or 'eager'")
        chosen = make_options(options)
        args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
        ranges = None if dynamic is None else parse_ranges(dynamic, self.model, args, example_kwargs or {})
        if ranges and (training or chosen.executor not in ("auto", "native")):
            raise InvalidInputError(
                "dynamic needs the native executor, without training; without dynamic every size is prepared"
            )
        if training and chosen.precision != "fp32":
            raise InvalidInputError(
                f"precision is {chosen.precision!r}, for inference alone; train in bf16 under torch.autocast"
            )
        self._how = None
        self._arm(How(chosen, training=training, falls_back=fallback == "eager", ranges=ranges))
        assert self._calls is not None
        try:
            self._calls.prepare(args, example_kwargs or {})
        except CaptureError as error:
            self._fall_back(error)
        return self

    def refresh(self) -> bool:
        """Compare every byte of the weights now; if any changed, prepare again at the next call.

        Call it after a write that torch does not record (through ``.data`` or NumPy, by another process) to a small
        part of a tensor; any other write is noticed without it. With ``training=True`` weights are read at every call.

        Returns:
            True if something has changed.
        """
        calls = (each for each in (self._calls, *self._parts) if isinstance(each, PreparedCalls))
        return sum(each.refresh() for each in calls) > 0  # each of them is asked

    def save(self, path: str | Path) -> int:
        """Write all schedules to one file, which :func:`mlsys_nimble.load` maps, and return its size in bytes.

        The file holds each program, its weights as kernels have packed them, and what was measured; no Python code. It
        is for the native executor, and processors with vectors as wide as this one's.

        Raises:
            InvalidInputError: nothing is prepared, or something has no form in a file; the message says what.
        """
        from mlsys_nimble.saved.writing import save

        prepared = self._calls.all if isinstance(self._calls, PreparedCalls) and self._eager is None else []
        if not prepared:
            what = "it is not prepared" if self._how is None else "it has no schedule for inference"
            raise InvalidInputError(f"this model cannot be saved: {what}; call prepare(example_inputs) first")
        return save(prepared, path)

    @property
    def trained(self) -> TrainedModel | None:
        """Return the training graphs used last, with their executors."""
        return self._calls.latest if self._calls and not isinstance(self._calls, PreparedCalls) else None

    @property
    def prepared(self) -> Prepared | None:
        """Return the schedule used last: its program, reports of the passes, its executor."""
        return self._calls.latest if isinstance(self._calls, PreparedCalls) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, in the model's own structure."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return self._transformed(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack() and self._how is not None and not self._how.training:
            with torch.no_grad(), eval_mode(self.model):  # something records operators, and sees none of a replay
                return self.model(*args, **kwargs)
        if self._eager is None:
            if self._calls is None:
                raise InvalidInputError("this model is not prepared: call prepare(example_inputs) first")
            try:
                return self._calls.call(args, kwargs)
            except CaptureError as error:
                self._fall_back(error)
        assert self._how is not None
        assert self._eager is not None
        if self._how.training:
            return self._eager(*args, **kwargs)
        with torch.no_grad(), eval_mode(self.model):
            return self._eager(*args, **kwargs)

    def _repr_html_(self) -> str:
        """Return a table of the schedule used last, for notebooks."""
        facts: dict[str, object] = {"prepared": "no: call prepare(example_inputs)"}
        if self._eager is not None:
            facts = {"prepared": "in parts; the others run eagerly"}
        elif self._how is not None and self._how.training:
            facts = {"prepared": "for training"}
        elif (last := self.prepared) is not None:
            program, options = last.program, self._how.options if self._how else None
            inputs = (program.values[value] for value in program.inputs)
            facts = {
                "prepared": "for inference",
                "inputs": ", ".join(f"{each.dtype} {list(each.shape)}" for each in inputs) or "none",
                "operators": f"{len(program.operators)}, of the model's {len(last.captured.program.operators)}",
                "executor": f"{type(last.executor).__name__} on {last.captured.device.type}",
            }
            facts["changes are noticed by"] = str(last.watch)
            if options is not None:
                facts["precision"] = options.precision
        return facts_html(f"Nimble({type(self.model).__name__})", facts)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the schedules, which hold threads and memory of this process."""
        return {**self.__dict__, "_calls": None, "_eager": None, "_parts": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._how is not None:
            self._arm(self._how)

    def _disarm(self) -> None:
        self._calls: PreparedCalls | TrainingCalls | None = None
        self._eager: Callable[..., Any] | None = None
        self._parts: list[PreparedCalls] = []  # graphs that run between eager parts

    def _arm(self, how: How) -> None:
        """Get ready for calls, each of which is prepared on first use."""
        self._disarm()
        if how.training:
            from mlsys_nimble.training.calls import TrainingCalls  # autograd's tracer takes a second to import

            self._calls = TrainingCalls(self.model, how.options)
        else:
            self._calls = PreparedCalls(self.model, how.options, in_eval_mode=True)
            if how.ranges is not None:
                self._calls.serve(how.ranges)
        self._how = how

    def _transformed(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model within ``grad``, ``vmap`` or another transform of ``torch.func``, which sees no replay."""
        if self._how is None or not self._how.falls_back:
            what = "a prepared model within a transform of torch.func (grad, vmap, jvp, jacrev)"
            advice = "Transform the model itself, take gradients by loss.backward(), or prepare with fallback='eager'."
            raise refuse(what, "", advice)
        if self._how.training:
            return self.model(*args, **kwargs)
        with torch.no_grad(), eval_mode(self.model):
            return self.model(*args, **kwargs)

    def _fall_back(self, error: CaptureError) -> None:
        assert self._how is not None
        if not self._how.falls_back:
            raise error
        _LOG.warning("parts of the model run eagerly: %s", error)
        if isinstance(error, CaughtError):
            self.__dict__["_eager"] = self.model
            return
        from mlsys_nimble.dynamo import backend

        compiled: Any = torch.compile(self.model, backend=backend(self._how.options, self._parts), dynamic=False)
        self.__dict__["_eager"] = compiled  # not a submodule: its weights are in `model` already


@dataclass(frozen=True, slots=True)
class How:
    """Options given to ``prepare``, without the example."""

    options: Options
    training: bool
    falls_back: bool  # use torch.compile where no schedule can hold the model
    ranges: Ranges | None = None  # sizes that one preparation serves


def compile(model: nn.Module, example_inputs: Any, **options: Any) -> Nimble:  # noqa: A001
    """Return ``Nimble(model).prepare(example_inputs, **options)``: the compiler that Nimble registers with core.

    Example:
        >>> compile(nn.ReLU(), torch.zeros(2), executor="reference")(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    return Nimble(model).prepare(example_inputs, **options)

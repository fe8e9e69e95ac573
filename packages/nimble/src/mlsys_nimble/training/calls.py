"""Training calls of one model: forward and backward graphs for each set of shapes and modes, made on first use."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mlsys_core.errors import MlsysError
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves

from mlsys_nimble.backends.executor import Executor, make_executor
from mlsys_nimble.capture.refusals import run_on_copies
from mlsys_nimble.capture.repeat import refuse_unrepeatable
from mlsys_nimble.errors import call_external, refuse, refuse_or_blame
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.program import Program
from mlsys_nimble.modes import unusual_modes
from mlsys_nimble.options import Options
from mlsys_nimble.state.forks import CAPTURE_LOCK, renew_in_forks
from mlsys_nimble.state.held import Held
from mlsys_nimble.state.weights import Watch
from mlsys_nimble.training.graphs import Partition, ReplayedGraph
from mlsys_nimble.training.state import Contents, Function, state_of

_LOG = logging.getLogger("mlsys_nimble")
_REFUSED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_ADVICE = "A schedule is fixed ahead of time; prepare with fallback='eager' to run that part eagerly."


class TrainedModel:
    """Model for one signature of arguments, whose forward and backward graphs are replayed.

    Args:
        model: Module whose tensors are read and written.
        options: Options given to ``prepare``.
        contents: Filled with the content of tensors that forward writes to, before its first run.
    """

    def __init__(self, model: nn.Module, options: Options, contents: Contents | None = None) -> None:
        self._options = options
        self.forward: ReplayedGraph | None = None
        self.backward: ReplayedGraph | None = None
        self._partition = Partition(rematerialises=options.rematerialises)
        parameters, others = state_of(model)
        self._function = Function(model, contents)
        compiled = aot_function(
            self._function,
            fw_compiler=self._take_forward,
            bw_compiler=self._take_backward,
            partition_fn=self._partition,
            num_params_buffers=len(parameters) + len(others),
        )
        self._call: Callable[..., Any] = partial(compiled, parameters, others)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, and put the tensors that forward keeps in their places."""
        result, kept = call_external(self._call, *args, **kwargs)
        if kept:
            self._function.keep(kept)
        return result

    @property
    def kept(self) -> list[tuple[Any, Any]]:
        """Return the places, container and key, of tensors that forward keeps."""
        return self._function.kept

    def _take_forward(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
        maker = executor_maker(self._options, saves=True)
        self.forward = ReplayedGraph(gm, maker, num_results=self._partition.num_results)
        return self.forward.as_function()

    def _take_backward(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
        self.backward = ReplayedGraph(gm, executor_maker(self._options, saves=False))
        return self.backward.as_function()


def executor_maker(options: Options, *, saves: bool) -> Callable[[Program, torch.device], Executor]:
    """Return a function that makes the executor of a training graph on a device.

    Args:
        options: Options given to ``prepare``.
        saves: True if results include tensors saved for a backward pass, which should not be copied.
    """

    def make(program: Program, device: torch.device) -> Executor:
        name = options.executor
        if name == "auto":
            name = "cuda" if device.type == "cuda" else "training"
        return make_executor(
            name,
            program,
            num_threads=options.num_threads,
            use_multi_stream=options.use_multi_stream,
            device=device,
            kernels=options.kernels,
            shares_pool=not saves,
            returns_in_place=saves,
        )

    return make


class TrainingCalls:
    """Training calls of one model; the counterpart of :class:`~mlsys_nimble.calls.PreparedCalls`.

    Args:
        model: Module whose parameters and buffers are read, and whose buffers are written, at every call.
        options: Options, of which ``max_schedules`` bounds the number of signatures kept.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model = model
        self._options = options
        self._models: OrderedDict[Any, TrainedModel] = OrderedDict()
        self._watch: Watch | None = None
        self._contents: Contents | None = None  # kept while it is prepared
        self.latest: TrainedModel | None = None
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Make a new lock: no call is running."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._models)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's result, connected to autograd's graph."""
        signature = self._signature(args, kwargs)
        with self._lock:
            if self._watch is not None and self._watch.has_changed():
                self._models.clear()
            found = self._models.get(signature)
            is_new = found is None
            if found is None:
                devices = sorted({leaf.device for leaf in tree_leaves((args, kwargs)) if _is_cuda(leaf)}, key=str)
                with CAPTURE_LOCK, torch.random.fork_rng(devices), Held(self._model):
                    refuse_unrepeatable(self._model, args, kwargs)
                found = self._models[signature] = TrainedModel(self._model, self._options, self._contents)
                if len(self._models) > self._options.max_schedules:
                    self._models.popitem(last=False)
            self._models.move_to_end(signature)
            self.latest = found
        try:
            result = found.call(*args, **kwargs)
        except _REFUSED as error:
            self._models.pop(signature, None)
            raise refuse(f"the model asks for what depends on values: {error}", "", _ADVICE) from error
        except MlsysError:
            self._models.pop(signature, None)
            raise
        except Exception as error:
            if not is_new:
                raise
            self._models.pop(signature, None)
            contents = {id(tensor): (tensor, tensor.detach().clone()) for tensor in state_of(self._model)[1].values()}
            with _restored(self._model, contents):
                run_on_copies(self._model, args, kwargs)  # raises the model's own error, if it has one
            raise refuse_or_blame(error, "AOTAutograd cannot trace the model", _ADVICE) from error
        if is_new:
            kept = [place for model in self._models.values() for place in model.kept]
            self._watch = Watch(self._model, (), (), ignored=kept)  # tensors are read at every call
        return result

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainedModel:
        """Run one step on the example, forward and backward; restore buffers, gradients and random generators."""
        begin = time.perf_counter()
        devices = sorted({leaf.device for leaf in tree_leaves((args, kwargs)) if _is_cuda(leaf)}, key=str)
        self._contents = {}
        with torch.random.fork_rng(devices), _restored(self._model, self._contents):
            results = [leaf for leaf in tree_leaves(self.call(args, kwargs)) if _has_gradient(leaf)]
            wanted = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            wanted += [leaf for leaf in tree_leaves((args, kwargs)) if _has_gradient(leaf)]
            if results and wanted and torch.is_grad_enabled():
                ones = [torch.ones_like(result) for result in results]
                torch.autograd.grad(results, wanted, ones, allow_unused=True)
        self._contents = None
        assert self.latest is not None
        counts = [
            len(graph.program.operators)
            for graph in (self.latest.forward, self.latest.backward)
            if graph is not None and graph.program is not None
        ]
        _LOG.info("prepared training: %s operators, %.2f s", " + ".join(map(str, counts)), time.perf_counter() - begin)
        return self.latest

    def _signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the key by which graphs are kept: arguments, gradients required, and modes that change operators."""
        flat = trees.flatten((args, dict(kwargs)))
        if any(isinstance(leaf, torch.Tensor) for item in flat.objects for leaf in trees.flatten(item).leaves):
            what = f"an argument of class {type(flat.objects[0]).__qualname__} that holds tensors"
            raise refuse(
                what, "", "Pass its tensors in tuples, lists or dictionaries, or prepare with fallback='eager'."
            )
        modes = tuple([module.training for module in self._model.modules()])
        wanted = tuple([parameter.requires_grad for parameter in self._model.parameters()])
        return (
            flat.spec,
            tuple([trees.key_of(leaf, _looks) for leaf in flat.leaves]),
            modes,
            wanted,
            unusual_modes(),
            torch.is_grad_enabled(),
        )


def _looks(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _is_cuda(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


@contextmanager
def _restored(model: nn.Module, contents: Contents) -> Iterator[None]:
    """Put a model's attributes back, and contents of its tensors; some may be added within the context."""
    with Held(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, content in contents.values():
                    if tensor.grad_fn is not None and not tensor._is_view():
                        tensor.detach_()
                    tensor.copy_(content)

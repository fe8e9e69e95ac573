"""The direct form of a whole network: planned from its wires, kept until a parameter or a part of it changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.backends.direct.forms import Floats, Form, TreesAndNetworks, affine_of, form, side_by_side
from mlsys_windtunnel.backends.direct.watch import Check, checks_of
from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.modules.base import Classifier, PredictorModule, Regressor
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding, Concatenate
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.native import Guard, NativeLinear, NativeTrees
from mlsys_windtunnel.modules.network import DIRECT, Network
from mlsys_windtunnel.modules.tree.heads import TreeClassifier
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor, nn

Piece = tuple[CategoryEmbedding | None, int]  # columns of a value: a slot, or the rows that an embedding has for it


@dataclass(frozen=True, slots=True)
class Program:
    """Functions of *slots*: first the tables of the frontier, then what each step adds."""

    steps: tuple[tuple[Form, tuple[int, ...]], ...]
    widths: tuple[int, ...]  # columns of the frontier's tables
    checks: tuple[tuple[int, Contract], ...]  # slots whose numbers are looked at
    reads: tuple[int, ...]  # of the functions below
    scores: Form
    answers: dict[str, Answer]
    predictor: PredictorModule | None

    def __call__(self, tables: Sequence[Floats], method: str) -> npt.NDArray[Any]:
        """Return the answer of the source's ``method``, in its shape; labels are class indices.

        Args:
            tables: The frontier's, ``[rows, width]`` each.
            method: A method that the network's predictor has; ``transform`` where it has none.

        Raises:
            InvalidInputError: an operator's source refuses a number.
        """
        slots = list(tables)
        for table, width in zip(slots, self.widths, strict=True):
            if table.shape[1] != width:  # of a folder that was tampered with; the kernels look at no index
                raise InvalidInputError(f"a table has {table.shape[1]} columns where the network reads {width}")
        for function, reads in self.steps:
            slots.append(function(*[slots[index] for index in reads]))
        for index, contract in self.checks:
            contract.check(slots[index])
        inputs = [slots[index] for index in self.reads]
        answer = self.answers.get(method)
        if answer is not None:
            return answer(*inputs)
        scores = self.scores(*inputs)
        if self.predictor is None:
            return scores
        with torch.inference_mode():
            result: npt.NDArray[Any] = self.predictor.answer(torch.from_numpy(scores), method).numpy()
        return result


def direct_program(network: Network) -> Program | None:
    """Return the network's direct form as it is now, or None if it has none."""
    kept: tuple[_Watch, Program | None] | None = vars(network).get(DIRECT)
    if kept is None or not kept[0].is_same():
        kept = vars(network)[DIRECT] = _Watch(network), plan(network)
    return kept[1]


def plan(network: Network) -> Program | None:
    """Join the operators' forms into a program; None if one has no form, or a tensor is not float64 on the CPU."""
    tensors = chain(network.parameters(), network.buffers())
    if any(t.device.type != "cpu" or (t.is_floating_point() and t.dtype != torch.float64) for t in tensors):
        return None
    planner = _Planner(network)
    for wire, module in zip(network.wires, network.operators, strict=True):
        is_last = module is network.output
        if isinstance(module, PredictorModule):
            return planner.ended_by(module, wire.inputs) if is_last else None
        if not planner.add(wire.name, module, wire.inputs):
            return None
    return planner.ended(network.wires[-1].name)


class _Planner:
    """Steps so far, and the pieces that each value consists of.

    Embeddings and tables side by side that one operator reads are not computed before it: it may do without.
    """

    def __init__(self, network: Network) -> None:
        self._ahead, self._late = checks_of(network)
        self._widths = tuple(width for _, width in network.frontier)
        self._steps: list[tuple[Form, tuple[int, ...]]] = []
        self._num_slots = len(network.frontier)
        self._pieces: dict[str, list[Piece]] = {name: [(None, slot)] for slot, (name, _) in enumerate(network.frontier)}
        self._num_readers = Counter(name for wire in network.wires for name in wire.inputs)

    def add(self, name: str, module: nn.Module, inputs: Sequence[str]) -> bool:
        """Add an operator, if it has a form."""
        if type(module) is Concatenate:
            self._pieces[name] = [piece for each in inputs for piece in self._pieces[each]]
        elif type(module) is CategoryEmbedding:
            self._pieces[name] = [(module, self._slot(inputs[0]))]
        else:
            function = form(module)
            if function is None:
                return False
            self._pieces[name] = [(None, self._step(function, [self._slot(each) for each in inputs]))]
        if self._num_readers[name] > 1:
            self._slot(name)
        return True

    def ended(self, name: str) -> Program:
        """Return a program that answers with a value as it is."""
        slot = self._slot(name)
        return self._program((slot,), lambda table: table, {}, None)

    def ended_by(self, predictor: PredictorModule, inputs: Sequence[str]) -> Program | None:
        """Return a program that ends in a predictor, or None if the predictor has no form."""
        scores = form(predictor)
        if scores is None:
            return None
        body = getattr(predictor, "body", None)
        if isinstance(body, Affine):
            embeddings, slots = zip(*self._pieces[inputs[0]], strict=True)
            guard = _guard(self._late, embeddings) if self._late else None
            if (of_pieces := affine_of(body, embeddings, guard=guard)) is not None:
                return self._program(slots, of_pieces, answers(predictor, of_pieces), predictor)
        self._ahead += self._late
        reads = tuple(self._slot(each) for each in inputs)
        return self._program(reads, scores, answers(predictor, scores), predictor)

    def _program(
        self, reads: tuple[int, ...], scores: Form, found: dict[str, Answer], predictor: PredictorModule | None
    ) -> Program:
        """Make a program with the checks made ahead: of each slot that a value is made of, but not of codes."""
        checks = dict.fromkeys(
            (slot, contract)
            for name, contract in self._ahead
            for embedding, slot in self._pieces[name]
            if embedding is None
        )
        return Program(tuple(self._steps), self._widths, tuple(checks), reads, scores, found, predictor)

    def _step(self, function: Form, reads: Sequence[int]) -> int:
        self._steps.append((function, tuple(reads)))
        self._num_slots += 1
        return self._num_slots - 1

    def _slot(self, name: str) -> int:
        """Return the slot of a value; compute the value if that was not done yet."""
        embeddings, slots = zip(*self._pieces[name], strict=True)
        if embeddings != (None,):
            self._pieces[name] = [(None, self._step(side_by_side(embeddings), slots))]
        return self._pieces[name][0][1]


def _guard(checks: Sequence[Check], embeddings: Sequence[CategoryEmbedding | None]) -> Guard:
    """Return the check of the tables of a linear map; codes are not looked at."""
    contracts = [contract for _, contract in checks]
    indices = [index for index, embedding in enumerate(embeddings) if embedding is None]

    def guard(tables: Sequence[Floats]) -> None:
        for index in indices:
            for contract in contracts:
                contract.check(tables[index])

    return guard


class _Watch:
    """Record of a module's parts and parameters, to see whether they are still the same."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(_parts(module))
        self._modules = [part for part in parts if not isinstance(part[2], Tensor)]
        self._tensors = [
            (owner, name, part, part._version, part.data_ptr())
            for owner, name, part in parts
            if isinstance(part, Tensor)
        ]

    def is_same(self) -> bool:
        """See the class."""
        for owner, name, part in self._modules:
            if owner.get(name) is not part:
                return False
        for owner, name, tensor, version, address in self._tensors:
            if owner.get(name) is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        return True


def _parts(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Yield submodules and tensors with the dictionaries that hold them; of trees, not what follows from parameters."""
    tensors = [module._parameters] if isinstance(module, Trees) else [module._parameters, module._buffers]
    for owner in (*tensors, module._modules):
        yield from ((owner, name, part) for name, part in owner.items() if part is not None)
    for part in () if isinstance(module, Trees) else module.children():
        yield from _parts(part)


Answer = Callable[..., npt.NDArray[Any]]  # of the predictor's inputs, in the source's shape; labels are class indices


def answers(predictor: PredictorModule, scores: Form) -> dict[str, Answer]:
    """Return answers by method; the module makes those that are not there of the scores.

    Args:
        predictor: The head.
        scores: The form of its ``forward``.
    """
    if type(predictor) is Regressor:
        return {"predict": _flat(scores) if predictor.is_flat else scores}
    if type(predictor) is Classifier and len(predictor.classes) > 1:
        return _of_classes(predictor, scores, slope=1.0)
    if type(predictor) is TreeClassifier and len(predictor.classes) > 1 and predictor.is_normalised:
        return _of_classes(predictor, scores, slope=predictor.slope)
    return {}


def _of_classes(predictor: Classifier, scores: Form, *, slope: float) -> dict[str, Answer]:
    if predictor.link == "identity":
        return {"predict_proba": scores, "predict": _likeliest(scores)} if slope == 1 else {}
    decides = getattr(predictor, "decides", "positive")
    found: dict[str, Answer] = {"decision_function": _flat(scores)}
    if decides != "likeliest":  # else rounding of probabilities decides, which is the module's affair
        found["predict"] = _likeliest(scores) if len(predictor.classes) > 2 else _second(scores, decides)
    if len(predictor.classes) > 2:
        if predictor.link == "softmax" and not isinstance(scores, TreesAndNetworks):  # whose bits are torch's
            found["predict_proba"] = _softmax(scores, slope)
    elif predictor.link == "logistic" and isinstance(scores, NativeTrees | NativeLinear):
        found["predict_proba"] = partial(scores, slope=slope)
    return found


def _second(scores: Form, decides: str) -> Answer:
    """Return the answer 1 where the margin is for the second class, else 0."""
    is_second = np.greater if decides == "positive" else np.greater_equal
    return lambda *x: is_second(scores(*x)[:, 0], 0).astype(np.int64)


def _flat(scores: Form) -> Answer:
    def flat(*x: Floats) -> Floats:
        table = scores(*x)
        return table[:, 0] if table.shape[1] == 1 else table

    return flat


def _likeliest(scores: Form) -> Answer:
    return lambda *x: scores(*x).argmax(axis=1)


def _softmax(scores: Form, slope: float) -> Answer:
    def probabilities(*x: Floats) -> Floats:
        scaled = scores(*x) * slope
        scaled -= scaled.max(axis=1, keepdims=True)
        np.exp(scaled, out=scaled)
        scaled /= scaled.sum(axis=1, keepdims=True)
        return scaled

    return probabilities

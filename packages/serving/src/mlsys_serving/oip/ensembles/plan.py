"""Declarations of ensembles and cascades, checked against the models that they name. Plain data; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from mlsys_core.errors import InvalidInputError

from mlsys_serving.certainty import RULES
from mlsys_serving.oip.datatypes import DataType
from mlsys_serving.oip.models.spec import ModelSpec, TensorSpec

SpecOf = Callable[[str], ModelSpec]  # raises if there is no such model
LEVEL = "level"


@dataclass(frozen=True, slots=True)
class Step:
    """One model of an ensemble."""

    model: str
    inputs: Mapping[str, str]  # the model's name of a tensor -> its name in the ensemble
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A directed graph of models; an edge is a tensor that one gives and another takes."""

    name: str
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def spec(self, spec_of: SpecOf) -> ModelSpec:
        """Return the spec of the whole: its inputs are the tensors that no step gives.

        Raises:
            InvalidInputError: Tensors do not fit, are given twice, or form a cycle.
        """
        specs = [spec_of(step.model) for step in self.steps]
        given: dict[str, TensorSpec] = {}
        for step, spec in zip(self.steps, specs, strict=True):
            for own, name in step.outputs.items():
                if name in given:
                    raise InvalidInputError(f"ensemble {self.name!r}: two steps give {name!r}")
                given[name] = replace(_tensor(self.name, spec, "output", own), name=name)
        wanted: dict[str, TensorSpec] = {}
        for step, spec in zip(self.steps, specs, strict=True):
            for own, name in step.inputs.items():
                tensor = _tensor(self.name, spec, "input", own)
                other = given.get(name) or wanted.setdefault(name, replace(tensor, name=name))
                if tensor.datatype is not other.datatype or not _may_fit(tensor.shape, other.shape):
                    raise InvalidInputError(
                        f"ensemble {self.name!r}: model {step.model!r} takes {own!r} as {tensor.datatype.value} "
                        f"{list(tensor.shape)}, and {name!r} is {other.datatype.value} {list(other.shape)}"
                    )
            missing = {each.name for each in spec.inputs if not each.optional} - step.inputs.keys()
            if missing:
                raise InvalidInputError(f"ensemble {self.name!r}: model {step.model!r} needs {sorted(missing)}")
        unknown = [name for name in self.outputs if name not in given]
        if unknown:
            raise InvalidInputError(f"ensemble {self.name!r}: no step gives the output {unknown[0]!r}")
        self.order()
        rows = _rows(self.name, specs)
        outputs = tuple(given[name] for name in self.outputs)
        return ModelSpec(
            name=self.name,
            inputs=tuple(wanted.values()),
            outputs=outputs,
            platform="ensemble",
            max_batch_size=rows,
            is_stateful=any(spec.is_stateful for spec in specs),
            takes_priorities=any(spec.takes_priorities for spec in specs),
        )

    def order(self) -> list[list[int]]:
        """Return, for each step, the steps whose tensors it takes.

        Raises:
            InvalidInputError: They form a cycle.
        """
        makers = {name: number for number, step in enumerate(self.steps) for name in step.outputs.values()}
        needs = [sorted({makers[name] for name in step.inputs.values() if name in makers}) for step in self.steps]
        try:
            TopologicalSorter(dict(enumerate(needs))).prepare()
        except CycleError as error:
            names = " -> ".join(self.steps[number].model for number in error.args[1])
            raise InvalidInputError(f"ensemble {self.name!r} has a cycle: {names}") from None
        return needs


@dataclass(frozen=True, slots=True)
class Level:
    """One model of a cascade, and when its answer is taken."""

    model: str
    output: str = ""  # with its scores, [rows, classes]; empty: the last level
    rule: str = "confidence"
    at_least: float = 0.0  # certainty


@dataclass(frozen=True, slots=True)
class Cascade:
    """Models by size; a row's answer is that of the first that is certain."""

    name: str
    levels: tuple[Level, ...]

    def spec(self, spec_of: SpecOf) -> ModelSpec:
        """Return the spec of the whole: the models' own, and the number of the level that answered each row.

        Raises:
            InvalidInputError: The models differ in their tensors, have no rows, or a level has no scores.
        """
        specs = [spec_of(level.model) for level in self.levels]
        first, rows = specs[0], _rows(self.name, specs)
        if not rows:
            raise InvalidInputError(f"cascade {self.name!r}: its models take no batches, so no row can go on alone")
        for level, spec in zip(self.levels, specs, strict=True):
            if not (_alike(first.inputs, spec.inputs) and _alike(first.outputs, spec.outputs)):
                raise InvalidInputError(
                    f"cascade {self.name!r}: models {first.name!r} and {level.model!r} have other inputs or outputs"
                )
            if not level.output:
                continue
            scores = _tensor(self.name, spec, "output", level.output)
            if not scores.datatype.is_floating or len(scores.shape) != 2:
                raise InvalidInputError(
                    f"cascade {self.name!r}: output {level.output!r} of model {level.model!r} is "
                    f"{scores.datatype.value} {list(scores.shape)}; a rule needs [rows, classes] of floats"
                )
        answered = TensorSpec(LEVEL, DataType.INT64, (-1,))
        if any(tensor.name == LEVEL for tensor in first.outputs):
            raise InvalidInputError(f"cascade {self.name!r}: its models have an output {LEVEL!r} themselves")
        return ModelSpec(
            name=self.name,
            inputs=first.inputs,
            outputs=(*first.outputs, answered),
            platform="cascade",
            max_batch_size=rows,
            is_stateful=any(spec.is_stateful for spec in specs),
            takes_priorities=any(spec.takes_priorities for spec in specs),
        )


Declared = Ensemble | Cascade


def check_rule(name: str, rule: str, at_least: float) -> None:
    """Check the rule of a level.

    Raises:
        InvalidInputError: No such rule, or a certainty that is none.
    """
    if rule not in RULES:
        raise InvalidInputError(f"cascade {name!r}: there is no rule {rule!r}; give {', '.join(RULES)}")
    if not 0 < at_least <= 1:
        raise InvalidInputError(f"cascade {name!r}: a certainty is above 0 and at most 1, got {at_least}")


def _tensor(name: str, spec: ModelSpec, what: str, wanted: str) -> TensorSpec:
    tensors = spec.inputs if what == "input" else spec.outputs
    found = next((tensor for tensor in tensors if tensor.name == wanted), None)
    if found is None:
        known = ", ".join(repr(tensor.name) for tensor in tensors)
        raise InvalidInputError(f"{name!r}: model {spec.name!r} has no {what} {wanted!r}; it has {known}")
    return found


def _may_fit(first: Sequence[int], second: Sequence[int]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(-1 in pair or pair[0] == pair[1] for pair in pairs)


def _alike(first: Sequence[TensorSpec], second: Sequence[TensorSpec]) -> bool:
    def known(tensors: Sequence[TensorSpec]) -> list[tuple[str, DataType, tuple[int, ...]]]:
        return sorted((tensor.name, tensor.datatype, tensor.shape) for tensor in tensors)

    return known(first) == known(second)


def _rows(name: str, specs: Sequence[ModelSpec]) -> int:
    """Return the most rows of a request; 0: the models have no rows."""
    sizes = {spec.max_batch_size for spec in specs}
    if 0 in sizes and len(sizes) > 1:
        raise InvalidInputError(f"{name!r}: some of its models take batches of rows, and some do not")
    return min(sizes)

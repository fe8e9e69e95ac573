"""Settings of one model, checked against what the model is. Plain data; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_serving.oip.models.spec import ModelSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Choice of the versions that are served; all of them where nothing is set."""

    num_latest: int | None = None
    specific: tuple[int, ...] | None = None

    def chosen(self, versions: Sequence[str]) -> list[str]:
        """Return the versions to serve, ascending.

        Raises:
            InvalidInputError: One that is asked for is not there.

        Example:
            >>> VersionPolicy(num_latest=2).chosen(["1", "10", "9"]), VersionPolicy(specific=(1,)).chosen(["1", "2"])
            (['9', '10'], ['1'])
        """
        found = sorted(versions, key=int)
        if self.specific is not None:
            missing = [number for number in self.specific if str(number) not in found]
            if missing:
                raise InvalidInputError(f"version_policy asks for version {missing[0]}; there are {', '.join(found)}")
            return [version for version in found if int(version) in self.specific]
        return found if self.num_latest is None else found[-self.num_latest :]


@dataclass(frozen=True, slots=True)
class TensorClaim:
    """A tensor as the configuration describes it, without the batch dimension."""

    name: str
    datatype: str  # "FP32"; empty: not said
    dims: tuple[int, ...]
    is_optional: bool = False  # an input that requests may leave out


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a warm-up request."""

    name: str
    datatype: str
    dims: tuple[int, ...]  # without the batch dimension
    is_random: bool


@dataclass(frozen=True, slots=True)
class Warmup:
    """Requests that are run before a model is ready."""

    name: str
    num_rows: int
    inputs: tuple[WarmupInput, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Configuration of a model."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0  # rows of a request; 0: the model's own
    inputs: tuple[TensorClaim, ...] = ()
    outputs: tuple[TensorClaim, ...] = ()
    versions: VersionPolicy = VersionPolicy()
    priority_levels: int = 0  # 0: priorities go as they come
    default_priority: int = 0
    default_timeout_s: float | None = None
    may_override_timeout: bool = False
    has_cache: bool = False
    is_decoupled: bool = False
    warmups: tuple[Warmup, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)  # further fields of the model's /config, as they came

    def priority(self, asked: int) -> int:
        """Return the level of a request; 0, and one beyond the levels, become the default, as in Triton.

        Example:
            >>> settings = ModelSettings(priority_levels=3, default_priority=2)
            >>> [settings.priority(asked) for asked in (0, 1, 3, 9)]
            [2, 1, 3, 2]
        """
        if not self.priority_levels:
            return asked
        return asked if 0 < asked <= self.priority_levels else self.default_priority

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return how long a request may take; a request's own timeout counts where it may override the default.

        Example:
            >>> settings = ModelSettings(default_timeout_s=2.0)
            >>> settings.timeout_s(None), settings.timeout_s(0.5)
            (2.0, 2.0)
        """
        if self.default_timeout_s is None or (self.may_override_timeout and asked_s is not None):
            return asked_s
        return self.default_timeout_s

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec under these settings.

        Raises:
            InvalidInputError: The configuration says something else than the model is.
        """
        for what, claimed, actual in (
            ("name", self.name, spec.name),
            ("platform", self.platform, spec.platform),
            ("backend", self.backend, "mlsys"),
        ):
            if claimed not in ("", actual):
                raise InvalidInputError(
                    f"the configuration of model {spec.name!r} has {what} {claimed!r}, not {actual!r}"
                )
        if self.max_batch_size > spec.max_batch_size:
            raise InvalidInputError(
                f"the configuration of model {spec.name!r} has max_batch_size {self.max_batch_size}, and the model "
                f"takes {spec.max_batch_size}: serve it with a larger --max-batch"
            )
        _check_tensors(spec, "input", self.inputs, spec.inputs)
        _check_tensors(spec, "output", self.outputs, spec.outputs)
        if self.has_cache and spec.is_stateful:
            raise InvalidInputError(f"model {spec.name!r} keeps state between requests: response_cache would lose it")
        if self.priority_levels and not spec.takes_priorities:
            raise InvalidInputError(f"model {spec.name!r} serves requests as they come: leave out priority_levels")
        rows = self.max_batch_size or spec.max_batch_size
        return replace(spec, max_batch_size=rows, parameters={**spec.parameters, **self.parameters})


NO_SETTINGS = ModelSettings()


def _check_tensors(spec: ModelSpec, what: str, claims: Sequence[TensorClaim], tensors: Sequence[TensorSpec]) -> None:
    by_name = {tensor.name: tensor for tensor in tensors}
    skipped = 1 if spec.max_batch_size else 0
    names = [claim.name for claim in claims]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidInputError(f"the configuration of model {spec.name!r} has {what} {twice[0]!r} twice")
    for claim in claims:
        tensor = by_name.get(claim.name)
        if tensor is None:
            raise InvalidInputError(
                f"the configuration of model {spec.name!r} has {what} {claim.name!r}; its {what}s are {list(by_name)}"
            )
        if claim.is_optional and not tensor.optional:
            raise InvalidInputError(
                f"the configuration of model {spec.name!r} has {what} {claim.name!r} as optional, and the model needs "
                "it"
            )
        dims = tensor.shape[skipped:]
        if claim.datatype not in ("", tensor.datatype.value) or (claim.dims and claim.dims != dims):
            raise InvalidInputError(
                f"the configuration of model {spec.name!r} has {what} {claim.name!r} as {claim.datatype} "
                f"{list(claim.dims)}, and it is {tensor.datatype.value} {list(dims)}"
            )

"""Settings of one model that its server's operator chooses. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlsys_core.errors import InvalidInputError

from mlsys_serving.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Bounds of a model's requests."""

    max_batch_size: int = 0  # rows of a request; 0: the model's own
    default_timeout_s: float | None = None  # None: a request without a timeout has none
    may_override_timeout: bool = False  # a request's own timeout counts, not the default

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
            InvalidInputError: The model takes fewer rows.
        """
        if self.max_batch_size > spec.max_batch_size:
            raise InvalidInputError(
                f"the configuration of model {spec.name!r} has max_batch_size {self.max_batch_size}, and the model "
                f"takes {spec.max_batch_size}: serve it with a larger --max-batch"
            )
        return replace(spec, max_batch_size=self.max_batch_size or spec.max_batch_size)


NO_SETTINGS = ModelSettings()

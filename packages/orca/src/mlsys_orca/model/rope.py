"""Rotary frequencies stretched for contexts longer than those a model was first trained on: numbers only.

Between the readers of configurations and :class:`~mlsys_orca.model.layers.Rotary`. Every kind of scaling comes down to
a divisor for each frequency and one factor for the cosines and sines. They are fixed when a model is loaded, so that
keys of any age fit each other and no answer depends on how long its neighbours are:

- ``dynamic`` scaling starts beyond the original context and changes all frequencies with every token from there on, so
  the context ends there;
- ``longrope`` has factors for short contexts and for long ones: the long ones are taken wherever the context that is
  served goes beyond the original, as by llama.cpp and vLLM. To have the short ones, serve the original context only:
  write it into ``config.json``'s ``max_position_embeddings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log, pi, sqrt
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import UnsupportedModelError


def rope_from_huggingface(raw: Mapping[str, Any], head_dim: int, *, max_positions: int) -> dict[str, Any]:
    """Return the rotary settings that a ``config.json`` states, in transformers 5's ``rope_parameters`` or older keys.

    Args:
        raw: The file's object.
        head_dim: Features of a head.
        max_positions: The context that the file states.

    Returns:
        Fields of :class:`~mlsys_orca.model.config.ModelConfig`.

    Raises:
        InvalidInputError: the scaling is not implemented, lacks a number, or is stated twice.
    """
    _refuse_two(raw)
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    rotary_dim = int(head_dim * (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0))
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    fields: dict[str, Any] = {
        "rope_theta": theta,
        "rotary_dim": rotary_dim if rotary_dim != head_dim else None,
        "max_positions": max_positions,
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if "long_factor" in rope:
        kind = "longrope"  # older files of Phi-3 call it "su" or "yarn"
    if kind == "default":
        return fields
    if kind == "dynamic":
        return fields | {"max_positions": min(original or max_positions, max_positions)}
    if kind == "linear":
        return fields | {"rope_divisors": (_number(rope, "factor"),) * (rotary_dim // 2)}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        stretch = {name: _number(rope, name) for name in names}
        divisors = llama3_divisors(theta, rotary_dim, **stretch, original_max_positions=original or max_positions)
        return fields | {"rope_divisors": divisors}
    if kind == "yarn":
        return fields | _yarn(rope, theta, rotary_dim, original or max_positions, max_positions)
    if kind == "longrope":
        return fields | _longrope(rope, rotary_dim // 2, original or max_positions, max_positions)
    raise UnsupportedModelError(f"rotary scaling {kind!r} (default, linear, llama3, yarn, longrope and dynamic are)")


def _refuse_two(raw: Mapping[str, Any]) -> None:
    """Refuse an older key beside a newer one that says something else: transformers forgets what only one of them says.

    Raises:
        InvalidInputError: ``rope_scaling`` was added to a file that has ``rope_parameters``.
    """
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or not old:
        return
    said = {"rope_type" if key == "type" else key: value for key, value in old.items()}
    if any(new.get(key) != value for key, value in said.items()):
        raise InvalidInputError(
            f"config.json has rope_scaling {dict(old)} beside other rope_parameters: write all of it, rope_theta too, "
            "into rope_parameters, and leave rope_scaling out"
        )


def _yarn(rope: Mapping[str, Any], theta: float, rotary_dim: int, original: int, max_positions: int) -> dict[str, Any]:
    factor = float(rope.get("factor") or max_positions / original)
    divisors = yarn_divisors(
        theta,
        rotary_dim,
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = yarn_amplitude(factor)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            amplitude = yarn_amplitude(factor, rope["mscale"]) / yarn_amplitude(factor, rope["mscale_all_dim"])
    return {
        "rope_divisors": divisors,
        "rope_amplitude": float(amplitude),
        "max_positions": max(max_positions, int(factor * original)),  # some files state the original context only
    }


def _longrope(rope: Mapping[str, Any], num_pairs: int, original: int, max_positions: int) -> dict[str, Any]:
    divisors = rope.get("long_factor" if max_positions > original else "short_factor")
    if not isinstance(divisors, list) or len(divisors) != num_pairs:
        raise InvalidInputError(f"rotary scaling 'longrope' needs {num_pairs} factors, for short contexts and for long")
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = longrope_amplitude(float(rope.get("factor") or max_positions / original), original)
    return {"rope_divisors": tuple(map(float, divisors)), "rope_amplitude": float(amplitude)}


def _number(rope: Mapping[str, Any], name: str) -> float:
    if not isinstance(value := rope.get(name), int | float):
        raise InvalidInputError(f"config.json's rotary scaling has no number at {name!r}")
    return float(value)


def llama3_divisors(
    theta: float,
    rotary_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> tuple[float, ...]:
    """Return Llama 3.1's divisors of the rotary frequencies: long waves slowed by ``factor``, short ones kept.

    In between is a ramp.

    Raises:
        InvalidInputError: the ramp has no width.

    Example:
        >>> stretch = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
        >>> llama3_divisors(10000.0, 4, **stretch)
        (1.0, 8.0)
    """
    divisors = []
    if (ramp := high_freq_factor - low_freq_factor) <= 0:
        raise InvalidInputError(
            f"rotary scaling 'llama3' has low_freq_factor = {low_freq_factor} and high_freq_factor = "
            f"{high_freq_factor}: the second must be the larger"
        )
    for pair in range(rotary_dim // 2):
        turns = original_max_positions * theta ** (-2 * pair / rotary_dim) / (2 * pi)  # over the original context
        kept = min(1.0, max(0.0, (turns - low_freq_factor) / ramp))
        divisors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(divisors)


def yarn_divisors(
    theta: float,
    rotary_dim: int,
    *,
    factor: float,
    original_max_positions: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Return YaRN's divisors (Peng et al., 2023, section 3.2).

    Like Llama 3.1's, with a ramp that is linear in the number of the frequency.

    Args:
        theta: Base of the frequencies.
        rotary_dim: Features that turn.
        factor: By what long waves are slowed.
        original_max_positions: The context of the first training, in tokens.
        beta_fast: Waves with more turns in that context are kept.
        beta_slow: Waves with fewer turns are slowed by all of ``factor``.
        truncate: Begin and end the ramp at whole numbers.

    Example:
        >>> yarn_divisors(10000.0, 8, factor=4.0, original_max_positions=64)
        (1.0, 1.6, 4.0, 4.0)
    """

    def where(turns: float) -> float:
        """Return the number of the frequency that makes so many turns."""
        return rotary_dim * log(original_max_positions / (turns * 2 * pi)) / (2 * log(theta))

    first, last = where(beta_fast), where(beta_slow)
    if truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    slowed = [min(1.0, max(0.0, (pair - first) / width)) for pair in range(rotary_dim // 2)]
    return tuple(1.0 / (share / factor + 1.0 - share) for share in slowed)


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for cosines and sines, which keeps the spread of scores (section 3.4).

    Example:
        >>> round(yarn_amplitude(4.0), 4)
        1.1386
    """
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


def longrope_amplitude(factor: float, original_max_positions: int) -> float:
    """Return LongRoPE's factor for cosines and sines (Ding et al., 2024).

    Example:
        >>> round(longrope_amplitude(32.0, 4096), 4)
        1.1902
    """
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original_max_positions))


def scale_of_scores(raw: Mapping[str, Any], size: int) -> float:
    """Return what multiplies the scores of heads with ``size`` features, stretched as the rotary scaling says."""
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scale: float = max(1, size) ** -0.5
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_amplitude(float(rope["factor"]), rope["mscale_all_dim"]) ** 2
    return scale

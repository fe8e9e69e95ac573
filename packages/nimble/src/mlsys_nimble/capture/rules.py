"""The table of rules: how each operator that torch dispatches becomes operators of a program.

A rule is a function of the builder, the type of the result (of each result, for an operator of several), and the
operator's arguments with :class:`~mlsys_nimble.capture.builder.Ref` for tensors. It emits what it needs and returns the
result's ref (a list for an operator of several), or ``NotImplemented`` where this use of the operator has no kind of
its own: torch then runs it. A name without an overload stands for all of them: ``"aten.relu"``, for ``relu_`` as well.

A family of operators is a file here; :data:`FAMILIES` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from inspect import Signature, signature
from typing import Any

from mlsys_nimble.capture.builder import Builder, NoKindError

Rule = Callable[..., Any]

FAMILIES = (
    "backward",
    "convolution",
    "indexing",
    "matmul",
    "normalisation",
    "pointwise",
    "quantised",
    "recurrent",
    "shape",
)

_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in _RULES, f"two rules for {name}"
            _RULES[name] = function
        return function

    return register


@cache
def _rules() -> dict[str, Rule]:
    for family in FAMILIES:
        import_module(f"mlsys_nimble.capture.rules_{family}")
    return _RULES


def apply_rule(rule: Rule, builder: Builder, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a rule; ``NotImplemented`` where it has no kind for this use or an argument."""
    try:
        _signature(rule).bind(builder, result, *args, **kwargs)
    except TypeError:
        return NotImplemented
    try:
        return rule(builder, result, *args, **kwargs)
    except NoKindError:  # nothing reads what it has emitted so far
        return NotImplemented


@cache
def _signature(rule: Rule) -> Signature:
    return signature(rule)


def find_rule(name: str) -> Rule | None:
    """Return the rule for ``"aten.relu.default"``: the overload's own, or else that of all ``aten.relu``."""
    rules = _rules()
    return rules.get(name) or rules.get(name.rpartition(".")[0])

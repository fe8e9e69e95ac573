"""Problems of a request's body without the branches of unions.

Pydantic reports why each branch of a union does not fit, and names the branch in the path of the field. A client knows
neither: it gets the fields of its own body, and the reason of the branch that it most likely meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class _Problem:
    path: tuple[Any, ...]  # keys and indices that the body has, or a key that is missing
    branches: tuple[tuple[int, Any], ...]  # per union, outermost first: the length of its path, and the branch
    error: Mapping[str, Any]


def without_branches(errors: Sequence[Mapping[str, Any]], body: Any) -> list[Mapping[str, Any]]:
    """Return the problems of the branches that ``body`` comes nearest to.

    Args:
        errors: As pydantic lists them; a path that begins with "body" is one of the body.
        body: Parsed JSON.

    Example:
        >>> branches = [("body", "stop", "str"), ("body", "stop", "list[str]", 1)]
        >>> errors = [{"type": "string_type", "loc": path, "msg": "Input should be a string"} for path in branches]
        >>> [error["loc"] for error in without_branches(errors, {"stop": ["a", 5]})]
        [('body', 'stop', 1)]
    """
    if not isinstance(body, dict | list):
        return list(errors)
    return [
        {**found.error, "loc": ("body", *found.path)} if found.error["loc"][:1] == ("body",) else found.error
        for found in _nearest([_walk(error, body) for error in errors], 0)
    ]


def _walk(error: Mapping[str, Any], value: Any) -> _Problem:
    """Follow the error's path through the body: a part that is not there is the name of a branch."""
    source, *parts = error["loc"] or ("",)
    path: list[Any] = []
    branches: list[tuple[int, Any]] = []
    for number, part in enumerate(parts if source == "body" else (), 1):
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if is_there:
            value = value[part]
        if is_there or (error["type"] == "missing" and number == len(parts)):
            path.append(part)
        else:
            branches.append((len(path), part))
    return _Problem(tuple(path), tuple(branches), {**error, "msg": _message(error)})


def _message(error: Mapping[str, Any]) -> str:
    """Return the reason without names of classes and functions."""
    context = error.get("ctx") or {}
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "Input should be a valid object"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = context["discriminator"]  # a quoted field, or a function's name
        tag = "the type" if tag.endswith("()") else tag
        if error["type"] == "union_tag_not_found":
            return f"Input should be an object, and have {tag}"
        return f"{tag} should be one of {context['expected_tags']}, got {context['tag']!r}"
    return str(error.get("msg", ""))


def _nearest(problems: Sequence[_Problem], level: int) -> list[_Problem]:
    """Return the problems in which one branch is left of each union from the given level on."""
    found = [problem for problem in problems if len(problem.branches) <= level]
    unions: dict[tuple[Any, ...], dict[Any, list[_Problem]]] = {}
    for problem in problems:
        if len(problem.branches) > level:
            depth, branch = problem.branches[level]
            unions.setdefault(problem.path[:depth], {}).setdefault(branch, []).append(problem)
    for where, branches in unions.items():
        ways = [_nearest(branch, level + 1) for branch in branches.values()]
        best = max(_nearness(way, where) for way in ways)
        first, *others = (way for way in ways if _nearness(way, where) == best)
        if len(first) == 1:  # several branches come equally near
            messages = dict.fromkeys(other.error["msg"] for (other,) in others if other.path == first[0].path)
            more = [text.removeprefix("Input should be ") for text in messages if text != first[0].error["msg"]]
            first = [replace(first[0], error={**first[0].error, "msg": " or ".join([first[0].error["msg"], *more])})]
        found += first
    return found


def _nearness(problems: Sequence[_Problem], where: tuple[Any, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Return how near a branch of the union at ``where`` comes; the greatest is the nearest.

    A value that breaks a limit comes nearer than one with a missing field, of another kind within, or of another kind.
    """

    def rank(problem: _Problem) -> int:
        kind = problem.error["type"]
        if kind == "literal_error":
            return 1
        if kind == "missing" or kind.endswith("_type"):
            return 2 if problem.path != where else 0
        return 3

    furthest = max(tuple(part for part in problem.path if isinstance(part, int)) for problem in problems)
    return min(map(rank, problems)), -len(problems), furthest

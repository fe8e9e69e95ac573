"""Checks of options by each other: a choice that there is not, and an option that the choice made does not read."""

from __future__ import annotations

from mlsys_core.errors import InvalidInputError


def require_choice(option: str, value: str, *allowed: str) -> None:
    """Refuse a value that is not among those allowed.

    Raises:
        InvalidInputError: It is not.

    Example:
        >>> require_choice("--executor", "both", "chunk", "cell")
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: --executor 'both': give chunk or cell
    """
    if value not in allowed:
        raise InvalidInputError(f"{option} {value!r}: give {_listed(allowed)}")


def require_read(what: str, chosen: str, *readers: str, **given: bool) -> None:
    """Refuse options that the choice made does not read.

    Args:
        what: Noun of the choices, like ``--policy``.
        chosen: The one that was made.
        readers: Those that read the options.
        given: By option, with underscores: whether it has another value than its default.

    Raises:
        InvalidInputError: One is given, and nothing would read it.

    Example:
        >>> require_read("--policy", "auto", "delay", window_ms=True)
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: --window-ms is for --policy delay, not auto: leave it out
    """
    for name, is_given in given.items():
        if is_given and chosen not in readers:
            option = name.replace("_", "-")
            raise InvalidInputError(f"--{option} is for {what} {_listed(readers)}, not {chosen}: leave it out")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}" if len(names) > 1 else names[0]

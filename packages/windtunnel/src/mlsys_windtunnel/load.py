"""Loads a fitted estimator from a file, safely by default.

skops files are loaded without running foreign code, and refused where they name types that skops does not vouch for.
joblib and pickle files can run any code while they load, so they need the user's word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

_PICKLES = (".joblib", ".pkl", ".pickle")


def load_estimator(path: Path, *, trust: bool = False) -> Any:
    """The estimator in a ``.skops``, ``.joblib``, ``.pkl`` or ``.pickle`` file.

    Args:
        path: The file.
        trust: Load what could run foreign code or crash the process. Only for files whose maker is trusted.

    Raises:
        InvalidInputError: no such file, another kind of file, damaged, or not to be loaded without ``trust``.
    """
    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file; give a fitted pipeline saved by skops or joblib")
    suffix = path.suffix.lower()
    if suffix == ".skops":
        return _load_skops(path, trust=trust)
    if suffix not in _PICKLES:
        raise InvalidInputError(
            f"{path}: cannot load {suffix or 'a file without suffix'}; give .skops, {', '.join(_PICKLES)}"
        )
    if not trust:
        raise InvalidInputError(
            f"{path} is a {suffix.removeprefix('.')} file, which can run any code while it loads; if you trust its "
            "maker, pass --trust (trust=True); skops files are safe to load"
        )
    import joblib

    with _damage_as_error(path):
        return joblib.load(path)


def _load_skops(path: Path, *, trust: bool) -> Any:
    import skops.io

    with _damage_as_error(path):
        untrusted = skops.io.get_untrusted_types(file=path)
    if untrusted and not trust:
        raise InvalidInputError(
            f"{path} holds types that are not trusted: {', '.join(untrusted)}; if you trust the file's maker, "
            "pass --trust (trust=True)"
        )
    with _damage_as_error(path):
        return skops.io.load(path, trusted=untrusted)


@contextlib.contextmanager
def _damage_as_error(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"{path} needs a package that is not installed: {error}") from error
    except Exception as error:  # a damaged or foreign file can raise anything
        reason = str(error).strip().splitlines()
        detail = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
        raise InvalidInputError(f"{path} cannot be loaded; it is damaged or of another format ({detail})") from error

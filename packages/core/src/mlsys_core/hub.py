"""Models under a hub's name, ``ORG/NAME``: weights, configuration and tokenizers, through ``huggingface_hub``.

The library keeps them in its own cache, asks with its own token (``HF_TOKEN``) and obeys ``HF_HUB_OFFLINE``. No
code and no pickle is fetched.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import shorten

from mlsys_core.errors import InvalidInputError, MissingDependencyError

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # of a repository; in its folders too
_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` may stand for a repository, or for a GGUF file in one.

    Example:
        >>> [is_hub_name(name) for name in ("org/model", "org/model/q4.gguf", "model", "/tmp/model", "a/b/c")]
        [True, True, False, False, False]
    """
    return _NAME.fullmatch(name) is not None and ".." not in name


def fetch(name: str) -> Path:
    """Return the folder of a repository's files, or one GGUF file of it; downloaded unless the cache has it.

    Args:
        name: ``ORG/NAME``, or ``ORG/NAME/FILE.gguf``.

    Raises:
        InvalidInputError: the hub has no such repository or file, or not for this user.
        MissingDependencyError: the hub cannot be reached, and the cache has nothing; or its library is missing.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, "the caller has asked is_hub_name"
    repository, file = match["repository"], match["file"]
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{name!r} is no file here; to load it from the hub: pip install huggingface_hub"
        ) from error
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file))
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS)))
    except GatedRepoError as error:
        raise InvalidInputError(
            f"{repository} asks for consent to its licence: give it on the hub, then set HF_TOKEN to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise InvalidInputError(
            f"{repository} is neither a folder here nor a repository of the hub that you may read: see the spelling, "
            "or set HF_TOKEN for a private one"
        ) from error
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError too: it was not asked, or did not answer
        raise _unreachable(repository, error) from error
    except EntryNotFoundError as error:
        raise InvalidInputError(f"{repository} has no file {file}") from error
    except OSError as error:  # of the library's HTTP errors too
        raise _unreachable(repository, error) from error


def _unreachable(repository: str, error: Exception) -> MissingDependencyError:
    said = str(error).strip().partition(". ")[0].rstrip(".") or type(error).__name__  # its first sentence
    reason = shorten(said, 200, placeholder=" ...")
    return MissingDependencyError(
        f"{repository} is no folder here, and the hub did not give it ({reason}). Where there is a network: "
        f"hf download {repository} --local-dir {repository.rpartition('/')[2]}; then name that folder here. Models "
        "that come as packages: mlsys models list"
    )

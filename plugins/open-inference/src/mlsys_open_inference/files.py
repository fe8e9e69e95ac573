"""Read the settings of models: Triton's text format or JSON, from a file or from a load request.

Of Triton's configuration the batch size and the time-outs are taken; another field is refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_serving.models.errors import UnsupportedError
from mlsys_serving.models.spec import ModelSettings

_log = logging.getLogger(__name__)
_MAX_NBYTES = 1 << 20
_SUFFIXES = {".pbtxt": False, ".json": True}
_FIELDS = ("name", "max_batch_size", "dynamic_batching")
_INSTEAD = (
    "the fields here are max_batch_size and dynamic_batching's default_queue_policy; who has a repository of Triton's "
    "runs Triton"
)


def load_config(parameters: object) -> ModelSettings | None:
    """Return the configuration that came with a load request; None: none did.

    Raises:
        UnsupportedError: It brings files, or parameters that are not known.
        InvalidInputError: It is no configuration.
    """
    if not isinstance(parameters, Mapping):
        raise InvalidInputError("'parameters' of a load request is an object")
    for name in parameters:
        if name != "config":
            what = "files" if str(name).startswith("file:") else f"the parameter {str(name)[:40]!r}"
            raise UnsupportedError(f"a load request takes a 'config', and not {what}: files come from the repository")
    if "config" not in parameters:
        return None
    text = parameters["config"]
    if not isinstance(text, str):
        raise InvalidInputError("'config' of a load request is a string that holds JSON")
    return parsed(text, is_json=True, what="the load request's config")


def find_config(folder: Path, stem: str) -> Path | None:
    """Return ``folder/stem.pbtxt`` or ``.json``, whichever is there; None: neither.

    Raises:
        InvalidInputError: Both are.
    """
    found = [path for suffix in _SUFFIXES if (path := folder / f"{stem}{suffix}").is_file()]
    if len(found) > 1:
        raise InvalidInputError(f"there are {found[0]} and {found[1].name}: keep one of them")
    return found[0] if found else None


class ConfigFiles:
    """Configurations by model, read anew at each load.

    Args:
        folder: With ``NAME.pbtxt`` or ``NAME.json``; None: there is none.
        folder_of: Returns a model's own folder, with ``config.pbtxt`` or ``config.json``.

    Raises:
        InvalidInputError: There is no such folder.

    Example:
        >>> ConfigFiles().settings("words") is None
        True
    """

    def __init__(self, folder: Path | None = None, folder_of: Callable[[str], Path | None] | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise InvalidInputError(f"--model-configs: {folder} is no folder")
        self._folder, self._folder_of = folder, folder_of

    @property
    def is_used(self) -> bool:
        """True if a model could have a file."""
        return self._folder is not None or self._folder_of is not None

    def settings(self, name: str) -> ModelSettings | None:
        """Return the configuration of a model; None: it has none.

        Raises:
            InvalidInputError: It cannot be read, or there are two.
        """
        path = self.path(name)
        return None if path is None else read_config(path)

    def warn_unused(self, names: Iterable[str]) -> None:
        """Log a warning for each file of ``--model-configs`` that is of none of these models."""
        known = set(names)
        for path in [] if self._folder is None else sorted(self._folder.iterdir()):
            if path.suffix in _SUFFIXES and path.stem not in known:
                _log.warning("%s is of no model here; there are: %s", path, ", ".join(sorted(known)) or "none")

    def path(self, name: str) -> Path | None:
        """Return the file of a model; that of ``--model-configs`` goes first."""
        found = None if self._folder is None else find_config(self._folder, name)
        own = None if found is not None or self._folder_of is None else self._folder_of(name)
        return found if own is None else find_config(own, "config")


def read_config(path: Path) -> ModelSettings:
    """Return the configuration in a file.

    Raises:
        InvalidInputError: It cannot be read, or is none; the message names the file.
    """
    try:
        if path.stat().st_size > _MAX_NBYTES:
            raise InvalidInputError(f"{path} is larger than {_MAX_NBYTES} bytes: that is no configuration")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    return parsed(text, is_json=_SUFFIXES[path.suffix], what=str(path))


def parsed(text: str, *, is_json: bool, what: str) -> ModelSettings:
    """Return the configuration in a text.

    Args:
        text: JSON, or protobuf's text format.
        is_json: Which of them.
        what: Names the text in errors.

    Raises:
        InvalidInputError: It is malformed, or has fields that mean nothing here.

    Example:
        >>> parsed("max_batch_size: 4", is_json=False, what="it").max_batch_size
        4
    """
    from google.protobuf import json_format, text_format  # only who has configurations pays for their imports

    from mlsys_open_inference.grpc.schema import messages

    message = messages().ModelConfig()
    try:
        if is_json:
            if not text.lstrip().startswith("{"):
                raise InvalidInputError(f"{what}: a configuration in JSON is an object")
            json_format.Parse(text, message)
        else:
            text_format.Parse(text, message)
    except (json_format.ParseError, text_format.ParseError) as error:
        raise InvalidInputError(f"{what}: {_reason(str(error))}") from error
    refused = [each.name for each, _ in message.ListFields() if each.name not in _FIELDS]
    refused += [each.name for each, _ in message.dynamic_batching.ListFields() if each.name != "default_queue_policy"]
    if refused:
        raise InvalidInputError(f"{what}: the field {refused[0]!r} is not supported ({_INSTEAD}); leave it out")
    queue = message.dynamic_batching.default_queue_policy
    if queue.allow_timeout_override and not queue.default_timeout_microseconds:
        _log.warning("%s: allow_timeout_override has no effect without default_timeout_microseconds", what)
    if message.max_batch_size < 0:
        raise InvalidInputError(f"{what}: max_batch_size is 0 or more")
    return ModelSettings(
        max_batch_size=message.max_batch_size,
        default_timeout_s=queue.default_timeout_microseconds / 1e6 or None,
        may_override_timeout=queue.allow_timeout_override,
    )


def _reason(text: str) -> str:
    """Return protobuf's message, with what to do instead of a field that is not known."""
    found = re.search(r'no field named "(\w+)"', text)
    if found is None:
        return text.splitlines()[0][:300]
    return f"the field {found[1]!r} is not supported ({_INSTEAD}); leave it out"

"""Read the configuration of models: Triton's text format or JSON, from a file or from a load request.

The message in ``open_inference.proto`` has the fields that mean something here, with Triton's numbers and names. What
it lacks is refused by name, with what to do instead.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_serving.oip.config.settings import (
    ModelSettings,
    TensorClaim,
    VersionPolicy,
    Warmup,
    WarmupInput,
)
from mlsys_serving.oip.errors import UnsupportedError

_log = logging.getLogger(__name__)
_MAX_NBYTES = 1 << 20
_MAX_WARMUPS = 1000  # requests of one entry
_MAX_WARMUP_ELEMENTS = 1 << 26  # of one input; more would take the server's memory
_SUFFIXES = {".pbtxt": False, ".json": True}
_SHOWN = ("version_policy", "dynamic_batching", "model_warmup", "response_cache")
_INSTEAD = {
    "instance_group": "serve with --instances N",
    "rate_limiter": "requests join batches that run: bound those that wait with serve's own options",
    "sequence_batching": "models that keep state have their sequences without it",
    "ensemble_scheduling": "declare it in a file of its own: serve --ensemble",
    "preferred_batch_size": "choose a policy: serve --policy",
    "max_queue_delay_microseconds": "choose a policy: serve --policy",
    "max_queue_size": "bound what waits with serve's own options",
    "timeout_action": "a request that is too late is always refused",
    "priority_queue_policy": "one default_queue_policy holds for all levels",
    "input_data_file": "give zero_data or random_data",
    "optimization": "choose a compiler: serve --compiler",
    "default_model_filename": "a model's files are known by its folder",
}


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
        >>> parsed("max_batch_size: 4 response_cache { enable: true }", is_json=False, what="it").has_cache
        True
    """
    from google.protobuf import json_format, text_format  # only who has configurations pays for their imports

    from mlsys_serving.oip.grpc.schema import messages

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
    shown = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return _settings(message, {name: shown[name] for name in _SHOWN if name in shown}, what)


def _settings(message: Any, shown: Mapping[str, Any], what: str) -> ModelSettings:
    batching, queue = message.dynamic_batching, message.dynamic_batching.default_queue_policy
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        raise InvalidInputError(f"{what}: default_priority_level is from 1 to {levels}, got {default}")
    if default and not levels:
        _log.warning("%s: default_priority_level has no effect without priority_levels", what)
    if queue.allow_timeout_override and not queue.default_timeout_microseconds:
        _log.warning("%s: allow_timeout_override has no effect without default_timeout_microseconds", what)
    if message.max_batch_size < 0:
        raise InvalidInputError(f"{what}: max_batch_size is 0 or more")
    return ModelSettings(
        name=message.name,
        platform=message.platform,
        backend=message.backend,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_claim(each, is_optional=each.optional) for each in message.input),
        outputs=tuple(_claim(each) for each in message.output),
        versions=_versions(message.version_policy, what),
        priority_levels=levels,
        default_priority=default,
        default_timeout_s=queue.default_timeout_microseconds / 1e6 or None,
        may_override_timeout=queue.allow_timeout_override,
        has_cache=message.response_cache.enable,
        is_decoupled=message.model_transaction_policy.decoupled,
        warmups=tuple(_warmup(each, what) for each in message.model_warmup),
        parameters={name: value.string_value for name, value in message.parameters.items()},
        shown=shown,
    )


def _versions(message: Any, what: str) -> VersionPolicy:
    match message.WhichOneof("policy_choice"):
        case "latest":
            if not message.latest.num_versions:
                raise InvalidInputError(f"{what}: num_versions of version_policy's latest is 1 or more")
            return VersionPolicy(num_latest=message.latest.num_versions)
        case "specific":
            if not message.specific.versions:
                raise InvalidInputError(f"{what}: version_policy names no version")
            return VersionPolicy(specific=tuple(message.specific.versions))
        case _:
            return VersionPolicy()


def _claim(tensor: Any, *, is_optional: bool = False) -> TensorClaim:
    return TensorClaim(tensor.name, _datatype(tensor), tuple(tensor.dims), is_optional)


def _warmup(entry: Any, what: str) -> Warmup:
    if not entry.inputs:
        raise InvalidInputError(f"{what}: warm-up {entry.name!r} has no inputs")
    if entry.count > _MAX_WARMUPS:
        raise InvalidInputError(f"{what}: warm-up {entry.name!r} runs {_MAX_WARMUPS} times at most")
    inputs = []
    for name, each in entry.inputs.items():
        kind = each.WhichOneof("input_data_type")
        if kind is None or any(size < 0 for size in each.dims):
            raise InvalidInputError(f"{what}: input {name!r} of a warm-up needs dims, and zero_data or random_data")
        if max(1, entry.batch_size) * math.prod(each.dims) > _MAX_WARMUP_ELEMENTS:
            raise InvalidInputError(
                f"{what}: input {name!r} of a warm-up has {entry.batch_size} rows of {list(each.dims)}: at most "
                f"{_MAX_WARMUP_ELEMENTS} numbers"
            )
        inputs.append(WarmupInput(name, _datatype(each), tuple(each.dims), kind == "random_data"))
    return Warmup(entry.name, entry.batch_size, tuple(inputs), entry.count or 1)


def _datatype(tensor: Any) -> str:
    """Return the protocol's name of a type; empty if none is given."""
    name: str = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
    short = name.removeprefix("TYPE_")
    return {"STRING": "BYTES", "INVALID": ""}.get(short, short)


def _reason(text: str) -> str:
    """Return protobuf's message, with what to do instead of a field that is not known."""
    found = re.search(r'no field named "(\w+)"', text)
    if found is None:
        return text.splitlines()[0][:300]
    name = found[1]
    instead = _INSTEAD.get(name, "it means nothing here")
    return f"the field {name!r} is not supported ({instead}); leave it out"

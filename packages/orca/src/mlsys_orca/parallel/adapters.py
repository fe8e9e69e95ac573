"""LoRA adapters of a divided model: every rank has its part of each, or none has.

They come over a channel of their own beside that of the steps, so that a large one holds up no iteration. A rank reads
it in a thread (:func:`follow`); the group's master, :class:`GroupAdapters`, waits for all ranks before it tells anyone.
Adapters that are there from the start are in the holders, and so in every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_orca.model.adapters import AdapterFiles
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.channels import ControlChannel
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError, Shard


def follow(shard: Shard, channel: ControlChannel) -> None:
    """Add and remove a rank's parts of adapters as its master says, until that has gone."""
    try:
        while (payload := channel.receive()) is not None:
            message = messages.decode_about_adapters(payload)
            if isinstance(message, messages.UnloadAdapter):
                shard.remove_adapter(message.key)
                continue
            error = None
            try:
                shard.add_adapter(message.key, AdapterFiles(message.source, message.config, message.weights))
            except MlsysError as raised:
                error = str(raised)
            channel.send(messages.encode(messages.AdapterLoaded(message.key, error)))
    except OSError:
        return  # the group is gone, which the rank's own loop notices


def following(shard: Shard, channel: ControlChannel) -> None:
    """Have a thread :func:`follow`; it ends with the process."""
    threading.Thread(target=follow, args=(shard, channel), name="orca-adapters", daemon=True).start()


class GroupAdapters:
    """Adapters that all ranks of a group have. Thread-safe.

    Args:
        ranks: The channels to all ranks.
        keys: Adapters that ranks have from the start.
    """

    def __init__(self, ranks: Sequence[tuple[Placement, ControlChannel]], keys: Collection[str] = ()) -> None:
        self._ranks, self._keys = ranks, frozenset(keys)
        self._changing = threading.Lock()

    @property
    def adapters(self) -> frozenset[str]:
        """Keys that requests may give."""
        return self._keys

    def add(self, key: str, files: AdapterFiles) -> None:
        """Have every rank add its part of an adapter; return when all have. A key that is there stays as it is.

        Raises:
            InvalidInputError: a rank cannot; none has it then.
            GroupBrokenError: a rank is gone.
        """
        with self._changing:
            if key in self._keys:
                return
            self._send(messages.LoadAdapter(key, files.source, files.config, files.weights))
            errors = [error for place, channel in self._ranks if (error := _answer(place, channel)) is not None]
            if errors:
                self._send(messages.UnloadAdapter(key))
                raise InvalidInputError(errors[0])
            self._keys |= {key}

    def remove(self, key: str) -> None:
        """Have every rank forget an adapter that no request uses any more.

        Raises:
            GroupBrokenError: a rank is gone.
        """
        with self._changing:
            self._keys -= {key}
            self._send(messages.UnloadAdapter(key))

    def _send(self, message: messages.AboutAdapters) -> None:
        payload = messages.encode(message)
        for place, channel in self._ranks:
            try:
                channel.send(payload)
            except OSError as error:
                raise GroupBrokenError(f"{place.name} is gone: {error}") from error


def _answer(place: Placement, channel: ControlChannel) -> str | None:
    """Wait until a rank has its part; return why it cannot have it."""
    payload = channel.receive()
    if payload is None:
        raise GroupBrokenError(f"{place.name} is gone")
    return messages.decode_adapter_loaded(payload).error

"""Profile tables: T[unit][batch_size] in seconds, measured once and read by schedulers and cost models.

A unit is whatever runs as a batch: a BatchMaker cell, a DVABatch stage, a model. :func:`measure` fills a
:class:`ProfileTable`; a :class:`ProfileCache` keeps it on disk, so that a machine measures a model once.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.files import atomic_write

_FORMAT = "mlsys-profile-table"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """The times of one unit.

    Raises:
        InvalidInputError: lengths differ or are 0, batch sizes do not rise from 1 or more, or a time is not positive.
    """

    unit: str
    batch_sizes: tuple[int, ...]  # rising
    seconds: tuple[float, ...]  # time of one batch, for each batch size: the median of the repeats, or the least
    spread: tuple[float, ...] = ()  # (slowest - fastest) / median of the repeats; () if not known

    def __post_init__(self) -> None:
        _check_batch_sizes(self.batch_sizes, f"unit {self.unit!r}")
        if len(self.seconds) != len(self.batch_sizes) or len(self.spread) not in (0, len(self.batch_sizes)):
            raise InvalidInputError(
                f"unit {self.unit!r} has {len(self.batch_sizes)} batch sizes, {len(self.seconds)} times and "
                f"{len(self.spread)} spreads; it takes one time, and one spread or none at all, for each batch size"
            )
        for batch_size, seconds in zip(self.batch_sizes, self.seconds, strict=True):
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidInputError(
                    f"unit {self.unit!r} takes {seconds} s at batch size {batch_size}: a time must be finite and "
                    "positive; if the clock is too coarse, let each run do more"
                )


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """T[unit][batch_size] in seconds, frozen and comparable.

    Raises:
        InvalidInputError: there is no unit, or one occurs twice.

    Example:
        >>> table = ProfileTable((UnitProfile("cell", (1, 2, 4, 8), (1.0, 1.0, 1.2, 2.4)),))
        >>> table.seconds("cell", 3)
        1.1
        >>> table.knee("cell")
        4
    """

    units: tuple[UnitProfile, ...]
    _by_name: dict[str, UnitProfile] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {profile.unit: profile for profile in self.units})
        if not self.units or len(self._by_name) != len(self.units):
            raise InvalidInputError(
                f"a profile table takes one or more units, each once; got {[profile.unit for profile in self.units]}"
            )

    def __getitem__(self, unit: str) -> UnitProfile:
        """Return the profile of ``unit``. Raise ``InvalidInputError`` if there is none."""
        try:
            return self._by_name[unit]
        except KeyError:
            raise InvalidInputError(f"no profile of unit {unit!r}; there are {', '.join(self._by_name)}") from None

    def seconds(self, unit: str, batch_size: int, *, extrapolate: bool = False) -> float:
        """Return the time of one batch in seconds: measured, or linear between the two measured neighbours.

        With ``extrapolate`` the first or last segment is extended, within the limits of batching: below the smallest
        size the time is at most that size's and at least its share of it; beyond the largest it does not fall. With a
        single measured size, the time is constant below it and proportional beyond it.

        Raises:
            InvalidInputError: unknown unit, a size below 1, or one outside the measured range without ``extrapolate``.
        """
        profile = self[unit]
        sizes, times = profile.batch_sizes, profile.seconds
        if batch_size < 1:
            raise InvalidInputError(f"batch_size={batch_size}: must be 1 or more")
        if sizes[0] <= batch_size <= sizes[-1]:
            right = bisect_left(sizes, batch_size)
            if sizes[right] == batch_size:
                return times[right]
            return _line(profile, right - 1, batch_size)
        if not extrapolate:
            raise InvalidInputError(
                f"unit {unit!r} was measured at batch sizes {sizes[0]} to {sizes[-1]}, not at {batch_size}; "
                "measure that size too, or pass extrapolate=True"
            )
        if batch_size < sizes[0]:
            drawn_on = _line(profile, 0, batch_size) if len(sizes) > 1 else times[0]
            return min(max(drawn_on, times[0] * batch_size / sizes[0]), times[0])
        if len(sizes) == 1:
            return times[0] * batch_size / sizes[0]
        return max(_line(profile, len(sizes) - 2, batch_size), times[-1])

    def throughput(self, unit: str, batch_size: int) -> float:
        """Return items per second at ``batch_size``; errors as :meth:`seconds`."""
        return batch_size / self.seconds(unit, batch_size)

    def knee(self, unit: str, *, fraction: float = 0.9) -> int:
        """Return the smallest measured batch size with at least ``fraction`` of the unit's best throughput.

        Larger batches add latency and little throughput (BatchMaker, Fig. 3); the smallest batch that fully uses the
        device is DVABatch's preferred batch size.

        Raises:
            InvalidInputError: unknown unit, or ``fraction`` outside (0, 1].
        """
        if not 0 < fraction <= 1:
            raise InvalidInputError(f"fraction={fraction}: must be above 0 and at most 1")
        profile = self[unit]
        rates = [size / seconds for size, seconds in zip(profile.batch_sizes, profile.seconds, strict=True)]
        enough = fraction * max(rates)
        return next(size for size, rate in zip(profile.batch_sizes, rates, strict=True) if rate >= enough)

    def to_json(self) -> str:
        """Return the table as a JSON document, exact to the last bit."""
        units = [
            {"unit": p.unit, "batch_sizes": p.batch_sizes, "seconds": p.seconds, "spread": p.spread} for p in self.units
        ]
        return json.dumps({"format": _FORMAT, "version": _VERSION, "units": units}, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> ProfileTable:
        """Return the table that :meth:`to_json` wrote.

        Raises:
            InvalidInputError: ``text`` is no profile table, or one of another version.
        """
        try:
            document: Any = json.loads(text)
            if document["format"] != _FORMAT or document["version"] != _VERSION:
                raise ValueError(f"{document['format']} version {document['version']}")
            return ProfileTable(
                tuple(
                    UnitProfile(
                        unit=str(unit["unit"]),
                        batch_sizes=tuple(unit["batch_sizes"]),
                        seconds=tuple(map(float, unit["seconds"])),
                        spread=tuple(map(float, unit["spread"])),
                    )
                    for unit in document["units"]
                )
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidInputError(
                f"no profile table of version {_VERSION} ({type(error).__name__}: {error}); measure it again"
            ) from error


def measure(
    units: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    run: Callable[[str, int], object],
    clock: Callable[[], float] = time.perf_counter,
    warmup: int = 2,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[Sequence[float]], float] = statistics.median,
) -> ProfileTable:
    """Time every unit at every batch size.

    Repeats are interleaved, every second pass in reverse, so that a change in the machine's speed meets all of them
    alike. The median of the repeats is kept, or what ``keep`` makes of them.

    Args:
        units: Names, each once.
        batch_sizes: Rising.
        run: Runs one batch of a unit and returns when it is done (synchronise the device); keep its inputs at hand.
        clock: Seconds.
        warmup: Untimed passes over everything before the first timed one.
        repeats: Timed passes.
        progress: Called as ``progress(done, total)`` after each run.
        keep: Seconds of all repeats -> those to keep. ``min`` withstands other work that comes and goes.

    Raises:
        InvalidInputError: an argument is out of range (nothing was run then), or the clock did not move in a run.

    Example:
        >>> table = measure(["cell"], [1, 2], run=lambda unit, batch_size: sum(range(1000 * batch_size)))
        >>> table["cell"].batch_sizes
        (1, 2)
    """
    if not units or len(set(units)) != len(units):
        raise InvalidInputError(f"units={list(units)}: name one or more units, each once")
    _check_batch_sizes(batch_sizes, "measure")
    if warmup < 0 or repeats < 1:
        raise InvalidInputError(f"warmup={warmup}, repeats={repeats}: warm up 0 or more times, repeat 1 or more")
    pairs = [(unit, batch_size) for unit in units for batch_size in batch_sizes]
    times: dict[tuple[str, int], list[float]] = {pair: [] for pair in pairs}
    total, done = (warmup + repeats) * len(pairs), 0
    for number in range(warmup + repeats):
        for unit, batch_size in pairs if number % 2 == 0 else reversed(pairs):
            start_s = clock()
            run(unit, batch_size)
            elapsed_s = clock() - start_s
            if number >= warmup:
                times[unit, batch_size].append(elapsed_s)
            done += 1
            if progress is not None:
                progress(done, total)
    return ProfileTable(tuple(_profile(unit, batch_sizes, times, keep) for unit in units))


def _profile(
    unit: str,
    batch_sizes: Sequence[int],
    times: dict[tuple[str, int], list[float]],
    keep: Callable[[Sequence[float]], float],
) -> UnitProfile:
    repeats = [times[unit, batch_size] for batch_size in batch_sizes]
    spread = [(max(each) - min(each)) / median if (median := statistics.median(each)) > 0 else 0.0 for each in repeats]
    return UnitProfile(unit, tuple(batch_sizes), tuple(map(keep, repeats)), tuple(spread))


def _check_batch_sizes(batch_sizes: Sequence[int], whose: str) -> None:
    rising = all(left < right for left, right in pairwise(batch_sizes))
    if not batch_sizes or not all(type(size) is int for size in batch_sizes) or batch_sizes[0] < 1 or not rising:
        raise InvalidInputError(
            f"{whose}: batch sizes must be integers of 1 or more, rising, at least one; got {list(batch_sizes)}"
        )


def _line(profile: UnitProfile, left: int, batch_size: int) -> float:
    """Return the value at ``batch_size`` of the line through the measured points ``left`` and ``left + 1``."""
    x0, x1 = profile.batch_sizes[left : left + 2]
    y0, y1 = profile.seconds[left : left + 2]
    return y0 + (y1 - y0) * (batch_size - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that a table's times depend on; another device, version or content is another table."""

    device: str  # description of the device: model, cores, threads used
    versions: tuple[tuple[str, str], ...]  # (distribution, version), sorted by name
    content: str  # the measured object: model, its weights' digest, dtype, batch sizes

    @staticmethod
    def of(device: str, versions: Mapping[str, str], content: str) -> ProfileKey:
        """Return a key made from a mapping of versions.

        Example:
            >>> ProfileKey.of("cpu", {"torch": "2.11", "mlsys-core": "0.1"}, "lstm-1024-float32").versions[0]
            ('mlsys-core', '0.1')
        """
        return ProfileKey(device, tuple(sorted(versions.items())), content)

    def digest(self) -> str:
        """Return the name of the key's file, without folder and ending."""
        return hashlib.sha256(self._text().encode()).hexdigest()[:32]

    def _text(self) -> str:
        return json.dumps({"device": self.device, "versions": dict(self.versions), "content": self.content})


class ProfileCache:
    """Profile tables in a folder, one file each, which also holds its key. Several processes may share it.

    Args:
        cache_dir: The folder; made when the first table is put into it.

    Example:
        >>> import tempfile
        >>> from mlsys_core.profiling import measure
        >>> cache = ProfileCache(Path(tempfile.mkdtemp()))
        >>> key = ProfileKey.of("cpu", {"torch": "2.11"}, "square")
        >>> run = lambda unit, batch_size: sum(range(99 * batch_size))
        >>> table = cache.get_or_measure(key, lambda: measure(["square"], [1, 2], run=run))
        >>> cache.get(key) == table
        True
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def path(self, key: ProfileKey) -> Path:
        """Return the path of the table of ``key``, whether it exists or not."""
        return self.cache_dir / f"{key.digest()}.json"

    def get(self, key: ProfileKey) -> ProfileTable | None:
        """Return the table of ``key``; None if there is none, or, with a ``RuntimeWarning``, if its file is damaged."""
        path = self.path(key)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["key"] != json.loads(key._text()):
                raise ValueError("it holds the table of another key")
            return ProfileTable.from_json(json.dumps(document["table"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # InvalidInputError is a ValueError
            warnings.warn(
                f"ignoring the profile {path}, it will be measured again: {error}", RuntimeWarning, stacklevel=2
            )
            return None

    def notes(self, key: ProfileKey) -> dict[str, float]:
        """Return the numbers that were stored beside the table of ``key``; empty if there are none."""
        try:
            document = json.loads(self.path(key).read_text(encoding="utf-8"))
            return {str(name): float(value) for name, value in document["notes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return {}

    def put(self, key: ProfileKey, table: ProfileTable, notes: Mapping[str, float] | None = None) -> None:
        """Store ``table`` under ``key``, replacing an older one.

        Args:
            key: of the table.
            table: to store.
            notes: finite numbers to store beside it, such as how quiet the machine was.

        Raises:
            InvalidInputError: the folder cannot be made or written to.
        """
        document = {"key": json.loads(key._text()), "table": json.loads(table.to_json()), "notes": dict(notes or {})}
        text = json.dumps(document, indent=1, allow_nan=False)
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path(key)) as file:
                file.write(text.encode())
        except OSError as error:
            raise InvalidInputError(
                f"cannot keep profiles in {self.cache_dir}: {error}; name another folder"
            ) from error

    def get_or_measure(
        self, key: ProfileKey, measure: Callable[[], ProfileTable], *, notes: Mapping[str, float] | None = None
    ) -> ProfileTable:
        """Return the table of ``key`` from the folder, or else measure and store it with ``notes``.

        ``notes`` are read after measuring, which may change them. A folder that cannot be written to causes a
        ``RuntimeWarning``; the table just measured is still returned.
        """
        table = self.get(key)
        if table is None:
            table = measure()
            try:
                self.put(key, table, notes)
            except InvalidInputError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return table

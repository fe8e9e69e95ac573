"""Tables whose distribution moves, week by week, from packages: flights of two kinds, and ratings of films."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

LATE_MINUTES = 15
GOOD_RATING = 4


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows in weeks."""

    frame: pd.DataFrame  # [rows, numbers and words]
    target: npt.NDArray[np.int64]  # [rows] 0 or 1
    week: npt.NDArray[np.int64]  # [rows], from 0
    numbers: tuple[str, ...]
    words: tuple[str, ...]
    first_weeks: int  # fitted on
    tested_from: int  # weeks before were looked at to choose update's defaults


def load_stream(name: str) -> Stream:
    """Read a stream.

    Raises:
        InvalidInputError: no such stream.
        MissingDependencyError: its file is not here; the message says how to get it.
    """
    if name not in STREAMS:
        raise InvalidInputError(f"{name!r} does not come in weeks here; there are {', '.join(STREAMS)}")
    return STREAMS[name](resolve_model(name, settings().cache_dir))


def _new_york(path: Path) -> Stream:
    """Flights from New York in 2013 as scheduled: whether each is late."""
    import pandas as pd

    table = pd.read_csv(path).dropna(subset=["arr_delay"])
    date = pd.to_datetime(table[["year", "month", "day"]])
    departs, arrives = (table[name] // 100 * 60 + table[name] % 100 for name in ("sched_dep_time", "sched_arr_time"))
    numbers = {"departs": departs, "arrives": arrives, "distance": table.distance, "day_of_year": date.dt.dayofyear}
    words = {name: table[name] for name in ("carrier", "origin", "dest")}
    return _stream(numbers, words, table.arr_delay > LATE_MINUTES, date, first_weeks=8, tested_from=17)


def _three_million(path: Path) -> Stream:
    """Every fifth flight within the US, January to June 2001, at take-off."""
    import pandas as pd

    table = pd.read_parquet(path)
    table = table[table.date < "2001-07-01"].sort_values("date", kind="stable").iloc[::5]
    minute = table.date.dt.hour * 60 + table.date.dt.minute
    numbers = {"minute": minute, "distance": table.distance, "day_of_year": table.date.dt.dayofyear}
    numbers["weekday"] = table.date.dt.day_of_week
    words = {"origin": table.origin, "destination": table.destination}
    return _stream(numbers, words, table.delay > LATE_MINUTES, table.date, first_weeks=8, tested_from=9)


def _films(path: Path) -> Stream:
    """Ratings of films in 1997 and 1998 by people of some age and occupation: whether each is good."""
    import pandas as pd

    ratings = pd.read_parquet(path)
    films, people = (
        pd.read_parquet(path.with_name(path.name.replace("_data", other))) for other in ("_items", "_users")
    )
    kinds = list(films.columns)[list(films.columns).index("unknown") + 1 :]
    films["released"] = pd.to_datetime(films.release_date, format="%d-%b-%Y", errors="coerce").dt.year
    table = ratings.merge(films[["movie_id", "released", *kinds]], on="movie_id").merge(people, on="user_id")
    table = table.sort_values("timestamp", kind="stable")
    date = pd.to_datetime(table.timestamp, unit="s")
    numbers = {name: table[name] for name in ("age", "released", "movie_id", *kinds)}
    words = {"gender": table.gender, "occupation": table.occupation, "region": table.zip_code.str[0]}
    return _stream(numbers, words, table.rating >= GOOD_RATING, date, first_weeks=8, tested_from=9)


def _stream(numbers: Any, words: Any, target: Any, date: Any, *, first_weeks: int, tested_from: int) -> Stream:
    import numpy as np
    import pandas as pd

    frame = pd.DataFrame(numbers).astype(np.float64)
    frame = frame.assign(**{name: column.astype(object) for name, column in words.items()}).reset_index(drop=True)
    week = ((date - date.min()).dt.days // 7).to_numpy(np.int64)
    whole = week < week.max()  # the last week is not whole
    return Stream(
        frame[whole].reset_index(drop=True),
        target.to_numpy(np.int64)[whole],
        week[whole],
        tuple(numbers),
        tuple(words),
        first_weeks,
        tested_from,
    )


STREAMS: dict[str, Callable[[Path], Stream]] = {
    "nycflights13": _new_york,
    "flights-3m": _three_million,
    "movielens-100k": _films,
}

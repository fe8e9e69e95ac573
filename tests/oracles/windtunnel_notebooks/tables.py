"""Tables such as notebooks read: passengers, houses, customers, reviews, and bicycles by the hour."""

from __future__ import annotations

import numpy as np
import pandas as pd

ROWS = 300
FITTED = 220  # the others are held out
_RNG = np.random.default_rng(11)


def _some(choices: list[str], shares: list[float] | None = None) -> np.ndarray:
    return np.asarray(_RNG.choice(np.array(choices, object), ROWS, p=shares))


def _gaps(column: np.ndarray, share: float) -> pd.Series:
    return pd.Series(column).mask(_RNG.random(ROWS) < share)


def _passengers() -> tuple[pd.DataFrame, np.ndarray]:
    sex = _some(["male", "female"], [0.65, 0.35])
    titles = np.where(sex == "male", _some(["Mr", "Master", "Rev"], [0.85, 0.1, 0.05]), _some(["Mrs", "Miss"]))
    table = pd.DataFrame(
        {
            "Pclass": _RNG.integers(1, 4, ROWS),
            "Name": [f"Name{number}, {title}. Given" for number, title in enumerate(titles)],
            "Sex": sex,
            "Age": _gaps(_RNG.normal(30, 14, ROWS).clip(0.4).round(1), 0.2),
            "SibSp": _RNG.poisson(0.5, ROWS),
            "Parch": _RNG.poisson(0.4, ROWS),
            "Fare": _RNG.lognormal(3, 1, ROWS).round(4),
            "Cabin": _gaps(np.array([f"{deck}{number}" for number, deck in enumerate(_some(list("ABCDEF")))]), 0.7),
            "Embarked": _gaps(_some(["S", "C", "Q"], [0.7, 0.2, 0.1]), 0.03),
        }
    )
    strength = 1.6 * (table.Sex == "female") - 0.5 * table.Pclass + 0.3 * np.log(table.Fare) + _RNG.normal(0, 0.6, ROWS)
    return table, (strength > strength.median()).to_numpy(int)


def _houses() -> tuple[pd.DataFrame, np.ndarray]:
    table = pd.DataFrame(
        {
            "LotArea": _RNG.lognormal(9, 0.5, ROWS).astype(int),
            "LotFrontage": _gaps(_RNG.normal(70, 20, ROWS).round(), 0.18),
            "OverallQual": _RNG.integers(2, 11, ROWS),
            "YearBuilt": _RNG.integers(1900, 2010, ROWS),
            "GrLivArea": _RNG.normal(1500, 400, ROWS).clip(400).round().astype(int),
            "Neighborhood": _some(["NAmes", "CollgCr", "OldTown", "Gilbert", "Blueste"], [0.4, 0.3, 0.2, 0.08, 0.02]),
            "ExterQual": _some(["Fa", "TA", "Gd", "Ex"], [0.1, 0.5, 0.3, 0.1]),
            "Alley": _gaps(_some(["Grvl", "Pave"]), 0.9),
            "CentralAir": _some(["Y", "N"], [0.9, 0.1]),
            "Sold": pd.Timestamp("2006-01-01") + pd.to_timedelta(_RNG.integers(0, 1600, ROWS), unit="D"),
        }
    )
    price = 2e4 * table.OverallQual + 60 * table.GrLivArea + 3e4 * (table.Neighborhood == "Gilbert")
    return table, (price * _RNG.lognormal(0, 0.15, ROWS)).to_numpy(float)


def _customers() -> tuple[pd.DataFrame, np.ndarray]:
    tenure = _RNG.integers(0, 72, ROWS)
    monthly = _RNG.normal(65, 25, ROWS).clip(18).round(2)
    table = pd.DataFrame(
        {
            "tenure": pd.array(tenure, dtype="Int64"),
            "MonthlyCharges": monthly,
            "TotalCharges": pd.Series((tenure * monthly).round(2)).astype(str).mask(tenure == 0, " "),
            "SeniorCitizen": _RNG.random(ROWS) < 0.2,
            "Partner": pd.array(_RNG.random(ROWS) < 0.5, dtype="boolean"),
            "Contract": pd.Categorical(_some(["Month-to-month", "One year", "Two year"], [0.5, 0.3, 0.2])),
            "Internet": pd.Series(_some(["DSL", "Fiber", "No"]), dtype="string"),
            "Payment": pd.Series(_some(["Check", "Card", "Transfer"]), dtype=object),
        }
    )
    table.loc[::17, "tenure"] = pd.NA
    leaves = (table.Contract == "Month-to-month") * 1.5 - tenure / 40 + _RNG.normal(0, 0.5, ROWS)
    return table, np.where(leaves > 0, "Yes", "No")


_WORDS = ["great", "bad", "love", "broken", "cheap", "battery", "screen", "works", "not", "very", "returned", "nice"]


def _reviews() -> tuple[pd.DataFrame, np.ndarray]:
    texts = [" ".join(_RNG.choice(_WORDS, _RNG.integers(3, 9))) + _RNG.choice([".", "!", ""]) for _ in range(ROWS)]
    table = pd.DataFrame(
        {
            "title": [text.split()[0].capitalize() for text in texts],
            "text": texts,
            "helpful": _RNG.poisson(2, ROWS),
            "product": _some(["phone", "tablet", "laptop"]),
        }
    )
    good = pd.Series(texts).str.count("great|love|nice") - pd.Series(texts).str.count("bad|broken|returned")
    return table, np.where(good + _RNG.normal(0, 0.3, ROWS) > 0, "pos", "neg")


def _bicycles() -> tuple[pd.DataFrame, np.ndarray]:
    hour = _RNG.integers(0, 24, ROWS)
    table = pd.DataFrame(
        {
            "season": pd.Categorical(_some(["spring", "summer", "fall", "winter"])),
            "month": _RNG.integers(1, 13, ROWS),
            "hour": hour,
            "holiday": _RNG.random(ROWS) < 0.1,
            "weather": pd.Categorical(_some(["clear", "misty", "rain", "heavy_rain"], [0.6, 0.28, 0.1, 0.02])),
            "temp": _RNG.normal(18, 8, ROWS).round(2),
            "humidity": _RNG.uniform(0.2, 1, ROWS).round(2),
        }
    )
    return table, _RNG.poisson(20 + 80 * np.exp(-((hour - 17) ** 2) / 20) + 2 * table.temp.clip(0)).astype(float)


TABLES = {
    "passengers": _passengers(),
    "houses": _houses(),
    "customers": _customers(),
    "reviews": _reviews(),
    "bicycles": _bicycles(),
}

"""Pipelines as practitioners write them: kinds of columns, text, encoders, missing cells."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
from sklearn import set_config
from sklearn.compose import (
    ColumnTransformer,
    make_column_selector,
    make_column_transformer,
)
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.feature_selection import SelectKBest, f_classif
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import LinearSVC

from tests.oracles.windtunnel_strangers import ensembles
from tests.oracles.windtunnel_strangers.parts import (
    KNOWN,
    NUMBER,
    NUMBERS,
    TABLE,
    THREE,
    WORDY,
    YES_NO,
    Build,
    days,
    in_pandas,
    log_price,
    mixed,
    mixed_dense,
    numbers,
    trees,
    with_ratio,
    words,
)

CASES: dict[str, Build] = {
    "numbers and words, logistic": lambda: (make_pipeline(mixed(), LogisticRegression()), None, YES_NO),
    "class weights": lambda: (make_pipeline(mixed(), LogisticRegression(class_weight="balanced")), None, THREE),
    "labels as categories": lambda: (make_pipeline(mixed(), LogisticRegression()), None, pd.Categorical(YES_NO)),
    "labels as booleans": lambda: (make_pipeline(mixed(), LogisticRegression()), None, YES_NO == "yes"),
    "labels nullable": lambda: (
        make_pipeline(mixed(), LogisticRegression()),
        None,
        pd.Series((YES_NO == "yes").astype(int), dtype="Int64"),
    ),
    "labels of pandas' strings": lambda: (
        make_pipeline(mixed(), RandomForestClassifier(4, max_depth=4, random_state=0)),
        None,
        pd.Series(YES_NO, dtype="string"),
    ),
    "trees on mixed columns": lambda: (make_pipeline(mixed(), trees()), None, THREE),
    "remainder passes": lambda: (
        make_pipeline(
            make_column_transformer((words(), WORDY), remainder="passthrough"),
            HistGradientBoostingClassifier(max_iter=3),
        ),
        [*WORDY, *NUMBERS, "is_member"],
        YES_NO,
    ),
    "remainder is scaled": lambda: (
        make_pipeline(make_column_transformer((words(), WORDY), remainder=numbers()), Ridge()),
        [*WORDY, *NUMBERS, "is_member"],
        NUMBER,
    ),
    "remainder of booleans and whole numbers": lambda: (
        make_pipeline(
            make_column_transformer((StandardScaler(), ["price"]), remainder="passthrough"), LogisticRegression()
        ),
        ["is_member", "price", "visits"],
        YES_NO,
    ),
    "columns by kind": lambda: (
        make_pipeline(
            make_column_transformer(
                (numbers(), make_column_selector(dtype_include="number")),
                (words(), make_column_selector(dtype_include=[object, "category"])),
            ),
            LogisticRegression(),
        ),
        [*NUMBERS, *WORDY],
        YES_NO,
    ),
    "columns by position": lambda: (
        make_pipeline(make_column_transformer((numbers(), [0, 1, 2]), (words(), slice(3, 5))), trees()),
        None,
        YES_NO,
    ),
    "columns by mask": lambda: (
        make_pipeline(
            make_column_transformer((numbers(), [True, True, True, False]), (words(), [False] * 3 + [True])), Ridge()
        ),
        [*NUMBERS, "city"],
        NUMBER,
    ),
    "columns within columns": lambda: (
        make_pipeline(
            make_column_transformer(
                (make_column_transformer((numbers(), ["age"]), (RobustScaler(), ["price"])), ["age", "price"]),
                (words(), WORDY),
            ),
            LogisticRegression(),
        ),
        None,
        YES_NO,
    ),
    "a union of two views": lambda: (
        make_pipeline(
            make_union(make_column_transformer((numbers(), NUMBERS)), make_column_transformer((words(), WORDY))),
            LogisticRegression(),
        ),
        None,
        YES_NO,
    ),
    "weights of parts": lambda: (
        make_pipeline(
            ColumnTransformer(
                [("n", numbers(), NUMBERS), ("w", words(), WORDY)], transformer_weights={"n": 2.0, "w": 0.5}
            ),
            Ridge(),
        ),
        None,
        NUMBER,
    ),
    "text and numbers": lambda: (
        make_pipeline(make_column_transformer((TfidfVectorizer(), "note"), (numbers(), NUMBERS)), LogisticRegression()),
        None,
        YES_NO,
    ),
    "pairs of words": lambda: (
        make_pipeline(
            make_column_transformer((CountVectorizer(ngram_range=(1, 2), min_df=2), "note")), MultinomialNB()
        ),
        None,
        THREE,
    ),
    "letters, then fewer dimensions": lambda: (
        make_pipeline(
            make_column_transformer((TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 3)), "note")),
            TruncatedSVD(5, random_state=0),
            LinearSVC(),
        ),
        None,
        YES_NO,
    ),
    "text alone": lambda: (
        make_pipeline(TfidfVectorizer(sublinear_tf=True), SGDClassifier(random_state=0)),
        "note",
        YES_NO,
    ),
    "text, words and trees": lambda: (
        make_pipeline(make_column_transformer((TfidfVectorizer(max_features=9), "note"), (words(), WORDY)), trees()),
        None,
        YES_NO,
    ),
    "log of the price": lambda: (
        make_pipeline(make_column_transformer((FunctionTransformer(log_price), ["price"]), (words(), WORDY)), Ridge()),
        None,
        NUMBER,
    ),
    "log by NumPy": lambda: (
        make_pipeline(make_column_transformer((FunctionTransformer(np.log1p), ["price", "visits"])), Ridge()),
        None,
        NUMBER,
    ),
    "a new column by a function": lambda: (
        make_pipeline(FunctionTransformer(with_ratio), SimpleImputer(), Ridge()),
        NUMBERS,
        NUMBER,
    ),
    "dates to days": lambda: (
        make_pipeline(
            make_column_transformer((FunctionTransformer(days), ["since"]), (numbers(), NUMBERS)),
            LogisticRegression(),
        ),
        None,
        YES_NO,
    ),
    "frames all the way": lambda: (in_pandas(mixed_dense(), StandardScaler(), LogisticRegression()), None, YES_NO),
    "frames, then trees": lambda: (in_pandas(mixed_dense(), trees()), None, THREE),
    "frames and chosen columns": lambda: (
        in_pandas(mixed_dense(), SelectKBest(f_classif, k=4), LogisticRegression()),
        None,
        YES_NO,
    ),
    "native categories": lambda: (
        trees(),
        ["age", "visits", "price", "size"],
        YES_NO,  # ordered ones, which LightGBM takes for numbers: refused
    ),
    "native categories of histograms": lambda: (
        HistGradientBoostingClassifier(max_iter=4, categorical_features="from_dtype"),
        ["age", "visits", "size"],
        THREE,
    ),
    "ordered categories": lambda: (
        make_pipeline(
            make_column_transformer((OrdinalEncoder(categories=[["S", "M", "L"]]), ["size"]), remainder="passthrough"),
            HistGradientBoostingRegressor(max_iter=3),
        ),
        ["size", *NUMBERS],
        NUMBER,
    ),
    "ordinals, unknown is -1": lambda: (
        make_pipeline(
            make_column_transformer(
                (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), WORDY),
                (SimpleImputer(), NUMBERS),
            ),
            RandomForestRegressor(4, max_depth=5, random_state=0),
        ),
        None,
        NUMBER,
    ),
    "ordinals, missing kept": lambda: (
        make_pipeline(
            make_column_transformer(
                (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan), WORDY),
                remainder="passthrough",
            ),
            HistGradientBoostingClassifier(max_iter=3),
        ),
        [*WORDY, *NUMBERS],
        YES_NO,
    ),
    "rare categories together": lambda: (
        make_pipeline(
            make_column_transformer(
                (OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=30), WORDY), (numbers(), NUMBERS)
            ),
            LogisticRegression(),
        ),
        None,
        YES_NO,
    ),
    "the first category dropped": lambda: (
        make_pipeline(make_column_transformer((OneHotEncoder(drop="first"), ["size", "is_member"])), Ridge()),
        None,
        NUMBER,
    ),
    "target means": lambda: (
        make_pipeline(make_column_transformer((TargetEncoder(random_state=0), WORDY), (numbers(), NUMBERS)), Ridge()),
        None,
        NUMBER,
    ),
    "target means of classes": lambda: (
        make_pipeline(make_column_transformer((TargetEncoder(random_state=0), WORDY)), LogisticRegression()),
        None,
        THREE,
    ),
    "nullable numbers": lambda: (
        make_pipeline(
            make_column_transformer((numbers(), ["grade", "score"]), (words(), ["code"])), LogisticRegression()
        ),
        None,
        YES_NO,
    ),
    "nullable numbers in trees": lambda: (
        make_pipeline(make_column_transformer((SimpleImputer(), ["grade", "score"]), remainder="drop"), trees()),
        None,
        YES_NO,
    ),
    "Arrow columns": lambda: (
        make_pipeline(
            make_column_transformer(
                (StandardScaler(), ["visits", "price"]), (OneHotEncoder(**KNOWN), ["size", "is_member"])
            ),
            LogisticRegression(),
        ),
        "arrow",
        YES_NO,
    ),
    **ensembles.CASES,
}


def fitted(name: str) -> tuple[Any, Any]:
    """Return a case's pipeline, fitted, and the table of its fit."""
    source, columns, target = CASES[name]()
    table: Any = TABLE
    if columns == "arrow":
        table = TABLE[["visits", "price", "size", "is_member"]].convert_dtypes(dtype_backend="pyarrow")
    elif columns is not None:
        table = TABLE[columns]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_config(enable_metadata_routing=False)
        return (source.fit(table) if target is None else source.fit(table, target)), table

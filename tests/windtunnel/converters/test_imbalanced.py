"""imbalanced-learn: its samplers do nothing but in a fit, its ensembles answer as scikit-learn's."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMClassifier
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import OneHotEncoder, StandardScaler

imblearn = pytest.importorskip("imblearn", reason="pip install imbalanced-learn")
from imblearn import ensemble  # noqa: E402
from imblearn.over_sampling import SMOTE, RandomOverSampler  # noqa: E402
from imblearn.pipeline import make_pipeline  # noqa: E402
from imblearn.under_sampling import RandomUnderSampler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": RNG.normal(40, 9, 300), "city": RNG.choice(["Bern", "Oslo", "Rome"], 300)})
Y = np.where(FRAME.age + 9 * (FRAME.city == "Rome") > 52, "rare", "usual")


def _columns():
    return make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(), ["city"]))


def test_pipelines_with_samplers(same_answers):
    trees = LGBMClassifier(n_estimators=5, verbose=-1, n_jobs=1)
    same_answers(make_pipeline(_columns(), RandomOverSampler(random_state=0), trees).fit(FRAME, Y), FRAME)
    same_answers(make_pipeline(_columns(), SMOTE(random_state=0), LogisticRegression()).fit(FRAME, Y), FRAME)
    first = make_pipeline(RandomUnderSampler(random_state=0), _columns(), LogisticRegression())
    same_answers(first.fit(FRAME, Y), FRAME)
    search = GridSearchCV(first, {"logisticregression__C": [0.1, 1.0]})
    same_answers(search.fit(FRAME, Y), FRAME)


@pytest.mark.parametrize(
    "name",
    ["BalancedBaggingClassifier", "BalancedRandomForestClassifier", "EasyEnsembleClassifier", "RUSBoostClassifier"],
)
def test_ensembles(same_answers, x, fresh, name):
    source = getattr(ensemble, name)(n_estimators=3, random_state=0)
    same_answers(source.fit(x, np.digitize(x[:, 0], [-0.5, 0.5])), fresh)

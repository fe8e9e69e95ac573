"""The picture of a translation."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
from lightgbm import LGBMClassifier
from mlsys_windtunnel import fine_tune, parse_pipeline, translate
from mlsys_windtunnel.cli.picture import picture
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def test_it_shows_each_operator_and_module_with_what_is_trained() -> None:
    x = np.random.default_rng(0).normal(size=(80, 3))
    y = x[:, 0] > 0
    light = LGBMClassifier(n_estimators=2, num_leaves=4, verbose=-1, n_jobs=1)
    source = make_pipeline(StandardScaler(), light).fit(x, y)
    exact = translate(source)
    soft = fine_tune(exact, x, y, epochs=1, init="source", level="L1").module
    for module in (exact, soft):
        page = picture(parse_pipeline(source), module)
        HTMLParser().feed(page)
        assert page.count("<rect") == 3 + 3  # input and two operators, frontier and two modules
        assert "StandardScaler" in page
        trained = sum(each.numel() for each in module.network.parameters() if each.requires_grad)
        assert f"{trained:,} of them trained" in page
    assert re.search("TreeClassifier of (Soft)?Trees", page)
    assert "SoftTrees" in page

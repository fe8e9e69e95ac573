"""The picture of a translation."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import networkx as nx
import numpy as np
from lightgbm import LGBMClassifier
from mlsys_windtunnel import fine_tune, parse_pipeline, translate
from mlsys_windtunnel.cli.inspect import picture, translation_graph
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.graph_checks import check_graph


def test_it_shows_each_operator_and_module_with_what_is_trained(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 3))
    y = x[:, 0] > 0
    light = LGBMClassifier(n_estimators=2, num_leaves=4, verbose=-1, n_jobs=1)
    source = make_pipeline(StandardScaler(), light).fit(x, y)
    exact = translate(source)
    soft = fine_tune(exact, x, y, epochs=1, init="source", level="L1").module
    for module in (exact, soft):
        page = picture(parse_pipeline(source), module)
        HTMLParser().feed(page)
        graph = translation_graph(parse_pipeline(source), module)
        check_graph(graph, tmp_path)
        assert len(graph) == 3 + 3  # input and two operators, frontier and two modules
        becomes = [edge for edge, is_one in nx.get_edge_attributes(graph, "becomes").items() if is_one]
        assert len(becomes) == 3
        assert all(one.removeprefix("pipeline: ") == other.removeprefix("network: ") for one, other in becomes)
        assert "StandardScaler" in page
        trained = sum(each.numel() for each in module.network.parameters() if each.requires_grad)
        assert f"{trained:,} of them trained" in page
    assert re.search("TreeClassifier of (Soft)?Trees", page)
    assert "SoftTrees" in page

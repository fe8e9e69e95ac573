"""The samplers of lengths have the means that were published of GLUE's sets, whatever the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_bench.dvabatch.workloads import GLUE_LIKE, LIKE, PublishedSize, lengths_like

SEEDS = st.integers(0, 2**32 - 1)
WITHIN = 0.15  # of the published mean; 2,000 draws of the widest sampler vary by 3 % themselves


@given(name=st.sampled_from(sorted(LIKE)), seed=SEEDS)
def test_lengths_have_the_published_mean_and_the_samplers_median(name: str, seed: int):
    of, lengths = LIKE[name], lengths_like(name, 2000, seed)
    assert of.least <= min(lengths) <= max(lengths) <= of.most
    assert abs(np.median(lengths) - of.median) <= max(1.0, 0.15 * of.median)
    if of.published is not None:
        assert np.mean(lengths) == pytest.approx(of.published.mean_tokens, rel=WITHIN)


@given(name=st.sampled_from(sorted(LIKE)), most=st.integers(8, 512), seed=SEEDS)
def test_no_length_is_above_what_a_model_takes(name: str, most: int, seed: int):
    if most >= LIKE[name].least:
        assert max(lengths_like(name, 200, seed, most)) <= most


def test_the_sets_are_the_papers_ten():
    assert set(GLUE_LIKE) == {"CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI", "AX"}
    assert all(of.published is not None for of in GLUE_LIKE.values())
    assert GLUE_LIKE["RTE"].described()["published_mean_tokens"] == pytest.approx(72.8, abs=0.1)
    assert "published_mean_tokens" not in LIKE["long-tailed"].described()


def test_sst_2_is_more_diverse_than_mrpc():
    """The paper's section 8.4 says so, and explains with it which set gains more."""
    spread = {name: np.std(lengths_like(name, 2000)) / np.mean(lengths_like(name, 2000)) for name in GLUE_LIKE}
    assert spread["SST-2"] > 2 * spread["MRPC"]
    assert min(spread, key=spread.__getitem__) == "MRPC"


def test_a_mean_is_what_is_left_of_the_bytes_without_the_columns_that_are_no_text():
    pairs = PublishedSize(split="train", num_bytes=2 * (46 + 46 + 2 * 4 + 8 + 4), num_examples=2)
    assert pairs.mean_text_nbytes == 92
    assert pairs.mean_tokens == pytest.approx(20 + 3)

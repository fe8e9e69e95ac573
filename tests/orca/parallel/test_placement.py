"""Every layer, head, feature and token of a model belongs to one place, whatever the degrees."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.slices import add_in_tree, num_slices, rank_degrees
from mlsys_orca.parallel.placement import Placement, all_places, check_degrees, shard_config
from mlsys_orca.parallel.shard import largest_of


def config_of(heads: int = 8, kv_heads: int = 4, head_dim: int = 64, inner: int = 512, layers: int = 4) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=1009,
        hidden_size=heads * head_dim,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=512,
        norm_eps=1e-5,
        windows=tuple(range(1, layers + 1)),
    )


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    return config_of(
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 32, 64])),
        inner=draw(st.integers(1, 40)) * draw(st.sampled_from([1, 2, 16, 32, 96, 256])),
        layers=draw(st.integers(1, 24)),
    )


@given(configs(), st.data())
def test_places_divide_the_model_without_rest_or_overlap(config: ModelConfig, data: st.DataObject) -> None:
    layers = config.num_layers
    ranks = data.draw(st.sampled_from(rank_degrees(config)))
    stages = data.draw(st.sampled_from([n for n in range(1, min(layers, 64) + 1) if layers % n == 0]))
    check_degrees(config, tensor_parallel=ranks, pipeline_parallel=stages)
    places = all_places(tensor_parallel=ranks, pipeline_parallel=stages)
    first_ranks = [place for place in places if place.rank == 0]
    assert [n for place in first_ranks for n in place.layers(config)] == list(range(config.num_layers))
    assert len({len(place.layers(config)) for place in places}) == 1
    stage = places[:ranks]
    assert [row for place in stage for row in place.vocabulary(config)] == list(range(config.vocab_size))
    assert [head for place in stage for head in place.share(config.num_heads)] == list(range(config.num_heads))
    for place in places:
        part = shard_config(config, place)
        assert part.num_heads * ranks == config.num_heads
        assert part.num_kv_heads * ranks == config.num_kv_heads
        assert part.intermediate_size * ranks == config.intermediate_size
        assert part.num_layers == len(place.layers(config))
        assert part.windows == tuple(n + 1 for n in place.layers(config))


@given(configs())
def test_slices_never_part_groups_or_heads(config: ModelConfig) -> None:
    number = num_slices(config)
    assert 1 <= number <= 4
    assert config.num_kv_heads % number == 0
    for features in (config.num_heads * config.head_dim, config.intermediate_size):
        together = next(size for size in (32, 16, 2, 1) if features % size == 0)
        assert features // number % together == 0


@pytest.mark.parametrize(("slices", "degrees"), [(8, (8,)), (4, (1, 2, 4)), (3, (1, 3)), (2, (1, 2))])
def test_ranks_that_add_their_own_subtrees_add_in_the_same_order(slices: int, degrees: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    parts = list(rng.standard_normal(slices).astype(np.float32))
    whole = add_in_tree(parts, np.add)
    for ranks in degrees:
        own = slices // ranks
        sums = [add_in_tree(parts[rank * own : (rank + 1) * own], np.add) for rank in range(ranks)]
        assert add_in_tree(sums, np.add) == whole


def test_eight_ranks_need_eight_heads() -> None:
    config = config_of(heads=32, kv_heads=8, inner=14336, layers=32)  # Llama 3
    assert (num_slices(config), num_slices(config, 8), rank_degrees(config)) == (4, 8, [1, 2, 4, 8])
    check_degrees(config, tensor_parallel=8, pipeline_parallel=8)
    with pytest.raises(InvalidInputError, match=r"tensor-parallel 8 does not divide .*; 1, 2 or 4 do$"):
        check_degrees(config_of(heads=32, kv_heads=4), tensor_parallel=8, pipeline_parallel=1)


def test_smollm2_has_three_slices() -> None:
    config = config_of(heads=9, kv_heads=3, inner=1536, layers=30)
    assert num_slices(config) == 3
    check_degrees(config, tensor_parallel=3, pipeline_parallel=2)
    with pytest.raises(InvalidInputError, match=r"tensor-parallel 2 does not divide .*9 heads, .*; 1 or 3 do$"):
        check_degrees(config, tensor_parallel=2, pipeline_parallel=1)
    with pytest.raises(InvalidInputError, match=r"pipeline-parallel 4 .* 30 layers; 1, 2, 3, 5, 6, 10, 15 or 30 do$"):
        shard_config(config, Placement(num_stages=4))


def test_a_model_of_one_key_head_takes_one_rank() -> None:
    with pytest.raises(InvalidInputError, match=r"; 1 does$"):
        check_degrees(config_of(kv_heads=1), tensor_parallel=2, pipeline_parallel=1)


@pytest.mark.parametrize("place", [{"stage": 1}, {"rank": 2, "num_ranks": 2}, {"stage": -1}])
def test_a_place_that_is_none_is_refused(place: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="count from 0"):
        Placement(**place)


def test_the_whole_models_place_changes_nothing() -> None:
    config = config_of()
    assert shard_config(config, Placement()) is config


def test_of_equal_peaks_the_first_column_is_the_largest() -> None:
    peaks = np.array([[[2.0, 4], [1.0, 1]], [[2.0, 9], [3.0, 8]], [[2.0, 12], [3.0, 13]]])
    assert largest_of(peaks).tolist() == [4, 8]


def test_placements_and_types_import_no_torch() -> None:
    code = "import sys, mlsys_orca.parallel.placement, mlsys_orca.parallel.shard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

from itertools import pairwise

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import RelativePositions
from mlsys_orca.model.families.t5 import bias_by_distance


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (64, 200)])
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int, is_causal: bool) -> None:
    """Far beyond the last distance too, whose number stands for all that follow."""
    from transformers.models.t5.modeling_t5 import T5Attention

    table = torch.randn(num_buckets, 3)
    positions = RelativePositions(num_buckets=num_buckets, max_distance=max_distance)
    found = bias_by_distance(table, positions, is_causal=is_causal)
    distances = torch.arange(-5 * max_distance, 1 if is_causal else 5 * max_distance)
    buckets = T5Attention._relative_position_bucket(
        distances, bidirectional=not is_causal, num_buckets=num_buckets, max_distance=max_distance
    )
    ours = found[:, distances.clamp(-max_distance, max_distance) + max_distance]
    assert torch.equal(ours, table[buckets].T)


def test_a_bucket_further_away_is_never_a_nearer_one() -> None:
    table = torch.arange(32.0)[:, None]
    found = bias_by_distance(table, RelativePositions(num_buckets=32, max_distance=128), is_causal=True)[0].tolist()
    assert found[:128] == sorted(found[:128], reverse=True)
    assert all(a - b <= 1 for a, b in pairwise(found[:128]))


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(0, 128), (6, 128), (32, 16)])
def test_impossible_buckets_are_refused(num_buckets: int, max_distance: int) -> None:
    with pytest.raises(InvalidInputError, match="buckets"):
        RelativePositions(num_buckets=num_buckets, max_distance=max_distance)

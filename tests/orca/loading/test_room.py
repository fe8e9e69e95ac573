"""Memory of a model that is loaded beside another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from mlsys_core.device.protocols import MemoryInfo
from mlsys_orca.loading import room
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.room import NoRoomError, check_room, require, weights_nbytes_at_least
from mlsys_orca.model.weights.gguf_file import GgufFile


@pytest.mark.parametrize("weights", ["float", "packed", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_is_at_most_what_the_weights_take(make_gguf: Callable[..., Path], weights: str, dtype: str) -> None:
    path = make_gguf(kind=gguf.GGMLQuantizationType.Q8_0)
    least = weights_nbytes_at_least(GgufFile(path), dtype=dtype, weights=weights)
    taken = load_model(path, dtype=dtype, weights=weights, backend="torch").weights_nbytes
    assert 0.5 * taken < least <= taken


def test_a_model_without_room_is_refused_with_figures(
    make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_gguf()
    check_room(path, dtype=None, weights=None, runs_in_torch=False, device="cpu")

    class Device:
        def memory_info(self) -> MemoryInfo:
            return MemoryInfo(total_nbytes=2**30, available_nbytes=2**10)

    monkeypatch.setattr(room, "get_device", lambda _: Device())
    with pytest.raises(NoRoomError, match=r"take \d+ MiB or more, and 0 MiB are available"):
        check_room(path, dtype=None, weights=None, runs_in_torch=False, device="cpu")
    with pytest.raises(NoRoomError, match=r"4096 MiB or more, and 0 MiB are .*--kv-tokens"):
        require(2**32, "100 K/V slots", "ask for fewer (--kv-tokens)", device="cpu")

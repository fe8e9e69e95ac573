"""Memory of a model that is loaded beside another."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from mlsys_core.device.protocols import MemoryInfo
from mlsys_orca.api.control import ModelControl
from mlsys_orca.api.supervised import serve_supervised
from mlsys_orca.engine.client import EngineConfig
from mlsys_orca.loading import room
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.named import load
from mlsys_orca.loading.room import NoRoomError, check_room, require, weights_nbytes_at_least
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_serving.http import HttpConfig
from mlsys_serving.http.port import BoundPort
from mlsys_serving.processes import GenerationLink, Handover


@pytest.mark.parametrize("weights", ["float", "packed", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_is_at_most_what_the_weights_take(make_gguf: Callable[..., Path], weights: str, dtype: str) -> None:
    path = make_gguf(kind=gguf.GGMLQuantizationType.Q8_0)
    least = weights_nbytes_at_least(GgufFile(path), dtype=dtype, weights=weights)
    taken = load_model(path, dtype=dtype, weights=weights, backend="torch").weights_nbytes
    assert 0.5 * taken < least <= taken


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any memory, as far as this check sees."""

    class Device:
        def memory_info(self) -> MemoryInfo:
            return MemoryInfo(total_nbytes=2**30, available_nbytes=2**10)

    monkeypatch.setattr(room, "get_device", lambda _: Device())


def test_there_is_room(make_gguf: Callable[..., Path]) -> None:
    check_room(make_gguf(), dtype=None, weights=None, runs_in_torch=False, device="cpu")


@pytest.mark.usefixtures("no_room")
def test_the_next_generation_looks_before_it_takes_memory(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf()
    with pytest.raises(NoRoomError, match="the weights of tiny"):
        load(str(path), None, is_beside_another=True)
    loaded = load(str(path), None)
    end, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = GenerationLink(end, 2, is_alone=False, handover=Handover())
    http = HttpConfig()
    with BoundPort("127.0.0.1", 0, config=http, answers=False) as bound, pytest.raises(NoRoomError, match="K/V slots"):
        serve_supervised(loaded, "tiny", EngineConfig(), http, bound=bound, control=ModelControl(generation=link))


@pytest.mark.usefixtures("no_room")
def test_a_model_without_room_is_refused_with_figures(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf()
    with pytest.raises(NoRoomError, match=r"take \d+ MiB or more, and 0 MiB are available"):
        check_room(path, dtype=None, weights=None, runs_in_torch=False, device="cpu")
    with pytest.raises(NoRoomError, match=r"4096 MiB or more, and 0 MiB are .*--kv-tokens"):
        require(2**32, "100 K/V slots", "ask for fewer (--kv-tokens)", device="cpu")

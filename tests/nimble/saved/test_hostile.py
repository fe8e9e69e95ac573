"""Files that were damaged or made up: refused in one line, or run within their own memory."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble, load
from mlsys_nimble.backends.cpu import packing
from mlsys_nimble.state.digest import Digest
from torch import nn

BEGIN = 64
PREFIX = struct.Struct("<8sQQQQ")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Flatten(),
        nn.LayerNorm(64),
        nn.Linear(64, 8),
        nn.Softmax(1),
    )
    path = tmp_path_factory.mktemp("hostile") / "model"
    Nimble(net).prepare(torch.zeros(2, 3, 8, 8), num_threads=1).save(path)
    return path.read_bytes()


def header_of(content: bytes) -> dict[str, Any]:
    nbytes = PREFIX.unpack_from(content)[2]
    found: dict[str, Any] = json.loads(content[BEGIN : BEGIN + nbytes])
    return found


def with_header(content: bytes, header: Any) -> bytes:
    """Return the file with another header, and a digest that fits."""
    _, version, nbytes, size, _ = PREFIX.unpack_from(content)
    text = json.dumps(header).encode()
    data = content[-(-(BEGIN + nbytes) // 64) * 64 : size]
    padding = bytes(-(BEGIN + len(text)) % 64)
    body = text + padding + data
    alive = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    digest = Digest([alive]).read()
    return PREFIX.pack(b"MLSYSNMB", version, len(text), BEGIN + len(body), digest).ljust(BEGIN, b"\0") + body


def refused(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=reason) as refusal:
        load(path)
    assert len(str(refusal.value).splitlines()) == 1


def test_damage_is_noticed(content: bytes, tmp_path: Path):
    path = tmp_path / "model"
    path.write_bytes(with_header(content, header_of(content)))
    load(path)(torch.zeros(2, 3, 8, 8))  # what the tests below start from is sound
    draw = random.Random(0)
    refused(path, b"", "no prepared model")
    refused(path, b"MLSYSNMB", "no prepared model")
    refused(path, b"x" * 1000, "no prepared model")
    for _ in range(10):
        refused(path, content[: draw.randrange(BEGIN, len(content))], "cut off")
        place = draw.randrange(BEGIN, len(content))
        refused(
            path, content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :], "damaged"
        )
    refused(path, content + b"more", "cut off")
    refused(path, content[:8] + b"\x09" + content[9:], "format 9, and this mlsys reads 2; save the model again")
    with pytest.raises(InvalidInputError, match="cannot read"):
        load(tmp_path / "missing")
    with pytest.raises(InvalidInputError, match="cannot read"):
        load(tmp_path)


def test_another_processor_is_told_what_to_do(content: bytes, tmp_path: Path):
    header = header_of(content)
    refused(
        tmp_path / "model", with_header(content, header | {"lanes": 2}), "MLSYS_KERNEL_LEVEL=x86-64-v3 in both places"
    )


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        header = header_of(content)
        change(header["schedules"][0])
        return with_header(content, header)

    return edit


def operator(schedule: dict[str, Any], kind: str) -> list[Any]:
    return next(each for each in schedule["operators"] if each[1] == kind)


def add_aten(schedule: dict[str, Any], target: str, *arguments: Any) -> None:
    made = len(schedule["values"])
    schedule["values"].append(["float32", [2, 8]])
    schedule["operators"].append(["evil", "Aten", [target, list(arguments), [], []], [schedule["outputs"][0]], [made]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: add_aten(s, "aten.from_file.default", "/etc/passwd"), "aten.from_file.default"),
        (lambda s: add_aten(s, "aten.set_.source_Tensor", {"input": 0}), "aten.set_.source_Tensor"),
        (lambda s: add_aten(s, "os.system", "true"), "os.system"),
        (lambda s: add_aten(s, "aten.relu.default", {"input": 3}), "do not fit Aten|does not hold"),
        (lambda s: s["values"][s["inputs"][0]].__setitem__(1, [2, 3, 800, 800]), "does not hold together"),
        (lambda s: operator(s, "Softmax")[2].__setitem__(0, 7), "does not hold together"),
        (lambda s: operator(s, "Pool")[2].__setitem__(1, [5, 5]), "does not hold together"),
        (lambda s: operator(s, "Convolution")[2].__setitem__(3, 3), "does not hold together"),
        (lambda s: operator(s, "Linear")[3].__setitem__(1, 0), "does not hold together"),
        (lambda s: s["constants"][0].__setitem__(0, 10**9), "is refused"),
        (lambda s: s["seconds"].update(x=float("nan")), "is refused|header"),
        (lambda s: s.update(num_threads=10**9), "is refused"),
        (lambda s: s["packed"].clear(), "packed weights of another size"),
        (lambda s: s["packed"].update({name: numbers[:1] for name, numbers in s["packed"].items()}), "packed weights"),
        (lambda s: s["call"].update(tensor=0), "is refused"),
        (lambda s: s["origins"].clear(), "is refused"),
        (lambda s: s.pop("operators"), "is refused"),
    ],
)
def test_made_up_schedules_are_refused(change: Any, reason: str, content: bytes, tmp_path: Path):
    refused(tmp_path / "model", edited(change)(content), reason)


def test_constants_without_memory_are_not_read(content: bytes, tmp_path: Path):
    torch.manual_seed(0)

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    path = tmp_path / "adds"
    Nimble(Adds()).prepare(torch.zeros(2, 4)).save(path)
    hollow = edited(lambda s: s["constants"][0].__setitem__(1, None))
    refused(tmp_path / "model", hollow(path.read_bytes()), "a constant without memory is read")


def test_any_change_of_a_number_is_refused_or_runs(content: bytes, tmp_path: Path):
    """Kernels read and write by what the file says: nothing that it says may lead them out of their memory."""
    draw, path, x = random.Random(1), tmp_path / "model", torch.randn(2, 3, 8, 8)
    outcomes = {"refused": 0, "ran": 0}
    for _ in range(150):
        header = header_of(content)
        places: list[tuple[Any, Any]] = []
        front: list[Any] = [header]
        while front:
            tree = front.pop()
            for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
                if isinstance(item, dict | list):
                    front.append(item)
                elif type(item) in (int, bool):
                    places.append((tree, key))
        tree, key = draw.choice(places)
        tree[key] = draw.choice([0, 1, -1, 2, 3, 64, 10**6, tree[key] + 1, tree[key] * 2])
        path.write_bytes(with_header(content, header))
        try:
            load(path)(x)
            outcomes["ran"] += 1
        except InvalidInputError as error:
            outcomes["refused"] += len(str(error).splitlines()) == 1
    assert outcomes["refused"] + outcomes["ran"] == 150
    assert outcomes["refused"] > 50
    assert outcomes["ran"] > 5


def test_packing_is_that_of_the_format(content: bytes):
    """Packed weights of format 2, for vectors of 8: whoever changes one of them gives the format another number."""
    weight = torch.arange(20 * 6 * 9.0).reshape(20, 6, 3, 3)
    packed = [
        packing.pack_convolution(weight, 1, 8),
        packing.pack_convolution(weight[:, :3], 2, 8),
        packing.pack_gemv(weight[:, :, 0, 0], 8),
        packing.pack_bias(weight[:, 0, 0, 0], 20, 2, 8),
        packing.pack_depthwise(weight[:, :1], 8),
        packing.pack_grouped(weight[:, :4], 8),
        packing.pack_winograd(weight[:16], 2, 8),
        packing.pack_row(weight[0, 0, 0], 8),
    ]
    sums = [float((each.double().flatten() * torch.arange(each.numel())).sum()) for each in packed]
    assert PREFIX.unpack_from(content)[1] == 2
    assert sums == pytest.approx(PACKED_SUMS, rel=1e-6)


PACKED_SUMS = [379763370.0, 153669150.0, 4757130.0, 180360.0, 8676060.0, 187836900.0, 472765056.0, 5.0]

"""Nimble's kernels layer by layer, on one thread, beside torch's own (oneDNN): GFLOP/s.

    taskset -c 1 mlsys bench nimble-kernels nets=resnet50

The layers are the distinct convolutions and linears of each net at batch 1. Results are compared before they are timed;
cases take turns, and the figure is the median of their turns. torch gets its weights reordered ahead of time, as
its own freezing does. Winograd's kernels are counted with the products that the direct form would need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.utils.mkldnn as mkldnn
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.turns import take_turns
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import Convolution, Linear
from torch import nn

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

TOLERANCE = 1e-5  # of the result's scale


@dataclass(frozen=True)
class Layer:
    """A convolution [channels, height, width] -> columns; kernel 0: a linear, over ``height`` rows."""

    channels: int
    height: int
    columns: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        if self.kernel == (0, 0):
            return f"linear {self.channels} > {self.columns}, {self.height} rows"
        name = "depthwise" if self.groups > 1 else "conv"
        stride = f" / {self.stride}" if self.stride > 1 else ""
        window = f"{self.kernel[0]}x{self.kernel[1]}"
        return f"{name} {window}{stride} {self.channels} > {self.columns} at {self.height}"


def linear(depth: int, columns: int, rows: int = 1) -> Layer:
    """Return the layer [rows, depth] -> [rows, columns]."""
    return Layer(depth, rows, columns, (0, 0))


def conv(size: int, channels: int, height: int, columns: int, stride: int = 1) -> Layer:
    """Return a convolution with a square window."""
    return Layer(channels, height, columns, (size, size), stride)


def depthwise(size: int, channels: int, height: int, stride: int = 1) -> Layer:
    """Return a convolution with one filter a channel."""
    return Layer(channels, height, channels, (size, size), stride, channels)


NETS = {
    "resnet50": [
        conv(7, 3, 224, 64, 2),
        *(conv(3, c, h, c) for c, h in ((64, 56), (128, 28), (256, 14), (512, 7))),
        *(conv(1, c, h, 4 * c) for c, h in ((64, 56), (128, 28), (256, 14), (512, 7))),
        *(conv(1, 4 * c, h, c) for c, h in ((64, 56), (128, 28), (256, 14), (512, 7))),
        *(conv(3, c, 2 * h, c, 2) for c, h in ((128, 28), (256, 14), (512, 7))),
        *(conv(1, 2 * c, 2 * h, 4 * c, 2) for c, h in ((128, 28), (256, 14), (512, 7))),
        linear(2048, 1000),
    ],
    "mobilenet_v2": [
        conv(3, 3, 224, 32, 2),
        *(depthwise(3, 32, 112), conv(1, 32, 112, 16), conv(1, 16, 112, 96), depthwise(3, 96, 112, 2)),
        *(conv(1, 96, 56, 24), conv(1, 24, 56, 144), depthwise(3, 144, 56), conv(1, 144, 56, 24)),
        *(depthwise(3, 144, 56, 2), conv(1, 144, 28, 32), conv(1, 32, 28, 192), depthwise(3, 192, 28)),
        *(conv(1, 192, 14, 64), conv(1, 64, 14, 384), depthwise(3, 384, 14), conv(1, 384, 14, 96)),
        *(conv(1, 96, 14, 576), depthwise(3, 576, 14), conv(1, 576, 7, 160), conv(1, 160, 7, 960)),
        *(depthwise(3, 960, 7), conv(1, 960, 7, 320), conv(1, 320, 7, 1280), linear(1280, 1000)),
    ],
    "efficientnet_b0": [
        *(conv(1, 40, 28, 240), depthwise(5, 144, 56, 2), depthwise(5, 240, 28), conv(1, 240, 28, 40)),
        *(depthwise(3, 240, 28, 2), conv(1, 80, 14, 480), depthwise(3, 480, 14), conv(1, 480, 14, 80)),
        *(depthwise(5, 672, 14), conv(1, 672, 14, 112), depthwise(5, 672, 14, 2), conv(1, 192, 7, 1152)),
        *(depthwise(5, 1152, 7), conv(1, 1152, 7, 192), conv(1, 1152, 1, 48), conv(1, 320, 7, 1280)),
    ],
    "inception_v3": [
        *(
            conv(3, 3, 299, 32, 2),
            conv(3, 32, 149, 32),
            conv(3, 32, 147, 64),
            conv(1, 64, 73, 80),
            conv(3, 80, 73, 192),
        ),
        *(
            conv(1, 192, 35, 64),
            conv(5, 48, 35, 64),
            conv(3, 64, 35, 96),
            conv(3, 96, 35, 96),
            conv(3, 288, 35, 384, 2),
        ),
        *(conv(1, 768, 17, 192), Layer(128, 17, 128, (1, 7)), Layer(128, 17, 192, (7, 1)), Layer(192, 17, 192, (1, 7))),
        *(conv(1, 2048, 8, 320), conv(1, 2048, 8, 448), conv(3, 448, 8, 384), Layer(384, 8, 384, (1, 3))),
        linear(2048, 1000),
    ],
    "nasnet_a_mobile": [
        *(
            conv(3, 3, 224, 32, 2),
            depthwise(5, 44, 28),
            depthwise(3, 44, 28),
            depthwise(7, 44, 28),
            conv(1, 44, 28, 44),
        ),
        *(conv(1, 264, 28, 44), depthwise(5, 88, 14), depthwise(3, 88, 14), conv(1, 88, 14, 88), conv(1, 528, 14, 88)),
        *(depthwise(5, 176, 7), depthwise(3, 176, 7), conv(1, 176, 7, 176), conv(1, 1056, 7, 176), linear(1056, 1000)),
    ],
    "resnet20_cifar": [
        *(conv(3, 3, 32, 16), conv(3, 16, 32, 16), conv(3, 16, 32, 32, 2), conv(3, 32, 16, 32)),
        *(conv(3, 32, 16, 64, 2), conv(3, 64, 8, 64), linear(64, 10)),
    ],
    "bert_base_128": [linear(768, 768, 128), linear(768, 3072, 128), linear(3072, 768, 128), linear(768, 768)],
}


@dataclass(frozen=True)
class Result:
    """GFLOP/s by case; None: it does not take the layer."""

    net: str
    layer: str
    mflop: float
    nimble: float
    winograd2: float | None
    winograd4: float | None
    torch: float


def runner(kernel: Kernel) -> Callable[[], object]:
    """Return a function that runs the kernel once, with scratch memory made beforehand."""
    scratch = torch.empty(kernel.scratch_nbytes, dtype=torch.uint8)
    return lambda: kernel.run(scratch=scratch)


def bench_layer(net: str, layer: Layer, seconds: float) -> Result:
    """Measure all cases on one layer."""
    built: dict[str, Kernel] = {}
    module: nn.Module
    if layer.kernel == (0, 0):
        module = nn.Linear(layer.channels, layer.columns).eval()
        x = torch.randn(layer.height, layer.channels)
        expected = module.double()(x.double())
        module.float()
        out = torch.empty(expected.shape)
        weight, bias = module.weight, module.bias
        built["nimble"] = convolutions.linear(Linear(has_bias=True), View.of(x), weight, bias, View.of(out))
    else:
        padding = (layer.kernel[0] // 2, layer.kernel[1] // 2)
        module = nn.Conv2d(
            layer.channels, layer.columns, layer.kernel, layer.stride, padding, groups=layer.groups
        ).eval()
        x = torch.randn(1, layer.channels, layer.height, layer.height).contiguous(memory_format=torch.channels_last)
        expected = module.double()(x.double())
        module.float()
        out = torch.empty(expected.shape).contiguous(memory_format=torch.channels_last)
        strides = (layer.stride, layer.stride)
        kind = Convolution(strides, tuple((p, p) for p in padding), (1, 1), layer.groups, has_bias=True)
        bound = (View.of(x), module.weight, module.bias, View.of(out))
        if convolutions.is_depthwise(kind, module.weight):
            built["nimble"] = convolutions.depthwise(kind, *bound)
        else:
            built["nimble"] = convolutions.convolution(kind, *bound)
        if convolutions.is_winograd(kind, module.weight):
            built["winograd2"] = convolutions.winograd(kind, *bound, size=2)
            built["winograd4"] = convolutions.winograd(kind, *bound, size=4)
    cases: dict[str, Callable[[], object]] = {}
    for name, kernel in built.items():
        cases[name] = runner(kernel)
        cases[name]()
        error = float((out.double() - expected).abs().max() / expected.abs().max())
        assert error < TOLERANCE, f"{name} on {layer}: off by {error:.1e} of the result's scale"
    reordered, x_reordered = mkldnn.to_mkldnn(nn.Sequential(module)), x.to_mkldnn()  # type: ignore[no-untyped-call]
    cases["torch"] = lambda: reordered(x_reordered)
    flop = 2 * expected.numel() * module.weight[0].numel()
    turns = take_turns(cases, turn_s=0.0, num_rounds=5, budget_s=seconds, fewest_calls=1, idle_s=0.0)
    speed = {name: flop / median(sample for turn in own for sample in turn) / 1e9 for name, own in turns.items()}
    return Result(
        net, str(layer), flop / 1e6, speed["nimble"], speed.get("winograd2"), speed.get("winograd4"), speed["torch"]
    )


def run(context: BenchContext, *, nets: tuple[str, ...] = tuple(NETS), seconds: float = 0.3) -> Section:
    """Measure the layers of ``nets``, each for so many seconds, on one thread."""
    if unknown := set(nets) - set(NETS):
        raise InvalidInputError(f"no net is called {min(unknown)!r}: there are {', '.join(NETS)}")
    torch.set_num_threads(1)
    layers = [(net, layer) for net in nets for layer in NETS[net]]
    if context.is_quick:
        layers, seconds = layers[-2:], 0.0
    rows = []
    with torch.no_grad(), context.console.status("") as status:
        for net, layer in layers:
            status.update(f"{net}: {layer}")
            rows.append(bench_layer(net, layer, seconds))
    return rows_section("Nimble: kernels by layer", rows, "GFLOP/s on one thread.")

"""An encoder's layers, packed for the compiled loops of ``encoder.cpp``: all texts of a batch in one call a stage."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.errors import InvalidInputError, KernelUnavailableError
from mlsys_core.memory.pages import advise_huge_pages
from mlsys_core.native import new, warn_without_kernels
from torch import Tensor, nn

from mlsys_encoders.models.config import BertConfig, Weights
from mlsys_encoders.models.native import library

if TYPE_CHECKING:
    from mlsys_encoders.models.layers import Layer, Places

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
GROUP = 32  # features of a weight that share a scale
WIDEST = 16  # numbers of the widest vector of any machine: rows that are no multiple of it run as torch's operators


def compiled_layers(layers: Sequence[Layer], config: BertConfig, weights: Weights = "float") -> CompiledLayers | None:
    """Return the layers for the compiled loops; None where torch's operators run.

    They do for other devices and dtypes, for widths that are no multiple of a vector, and for want of kernels.

    Args:
        layers: All of the encoder's, on any device and of any dtype.
        config: Their shape.
        weights: "float", or "int8": products of int8 values.

    Raises:
        InvalidInputError: "int8" cannot be had: only the compiled loops have it, for widths of whole groups.
    """
    found = _compiled_layers(layers, config, weights)
    if found is None and weights == "int8":
        raise InvalidInputError(
            "--weights int8 needs an encoder in fp32 on the CPU, a C++ compiler, and widths that are multiples of "
            f"{GROUP} (heads: of {WIDEST}): leave it out to run in floats"
        )
    return found


def _compiled_layers(layers: Sequence[Layer], config: BertConfig, weights: Weights) -> CompiledLayers | None:
    weight = layers[0].up.weight
    widths = (config.hidden_size, config.hidden_size // config.num_heads, config.intermediate_size)
    if not weight.is_cpu or weight.dtype is not torch.float32 or any(width % WIDEST for width in widths):
        return None
    if config.activation not in ACTIVATIONS:
        return None
    if weights == "int8" and (config.hidden_size % GROUP or config.intermediate_size % GROUP):
        return None
    try:
        return CompiledLayers(layers, config, weights=weights)
    except KernelUnavailableError as error:
        warn_without_kernels("DVABatch's encoders", "torch's operators run", error)
        return None


@contextmanager
def short_operators() -> Iterator[int]:
    """Give torch's operators around the layers one thread: they are short, and their helpers would spin beside layers.

    Yields:
        The threads that torch had before: the layers'.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


class CompiledLayers:
    """Layers whose weights are packed once, read only.

    Args:
        layers: All of the encoder's, float32 on the CPU.
        config: Their shape.
        flags: For the compiler; see :func:`.library.load`.
        weights: "int8": weights and rows are quantised, with a scale for each 32 features.

    Raises:
        KernelUnavailableError: There is no C++ compiler.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        config: BertConfig,
        flags: tuple[str, ...] = (),
        *,
        weights: Weights = "float",
    ) -> None:
        self._library = library.load(flags)
        self.weights = weights
        self._kept: list[Tensor] = []  # what the structures point into
        self._thetas = sorted(set(config.thetas))
        structs = self._library.structs
        self._layers = (structs["Layer"] * len(layers))(*(self._layer(each) for each in layers))
        self._encoder = new(
            structs["Encoder"],
            layers=addressof(self._layers),
            size=config.hidden_size,
            inner=config.intermediate_size,
            num_heads=config.num_heads,
            activation=ACTIVATIONS[config.activation],
            is_pre_norm=config.is_pre_norm,
            is_gated=config.is_gated,
            eps=config.layer_norm_eps,
        )

    def run(
        self,
        hidden: Tensor,
        lengths: Sequence[int],
        places: Places,
        first: int,
        stop: int,
        *,
        threads: int | None = None,
    ) -> Tensor:
        """Run layers ``first`` to ``stop - 1``.

        Args:
            hidden: fp32 [tokens of all texts, features].
            lengths: Tokens of each text.
            places: Positions of the tokens.
            first: First layer.
            stop: Behind the last one.
            threads: To run on, one call at a time; None: as many as torch's operators would.

        Returns:
            The states, a new tensor shaped as ``hidden``.
        """
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        turns = [tuple(each.contiguous() for each in places.rotations[theta]) for theta in self._thetas]
        cosines, sines = (_addresses([turn[part] for turn in turns]) for part in (0, 1))
        bias = None if places.bias is None else places.bias.contiguous()
        numbers = (ctypes.c_int64 * len(lengths))(*lengths)
        batch = new(
            self._library.structs["Batch"],
            hidden=hidden.data_ptr(),
            lengths=addressof(numbers),
            num_texts=len(lengths),
            first_layer=first,
            stop_layer=stop,
            threads=threads or torch.get_num_threads(),
            bias=None if bias is None else bias.data_ptr(),
            longest=max(lengths),
            cosines=addressof(cosines),
            sines=addressof(sines),
        )
        self._library.encoder_run(byref(self._encoder), byref(batch))
        return hidden

    def _layer(self, layer: Layer) -> Any:
        return new(
            self._library.structs["Layer"],
            query_key_value=self._matrix(layer.query_key_value),
            attention_output=self._matrix(layer.attention_output),
            up=self._matrix(layer.up),
            down=self._matrix(layer.down),
            attention_norm=self._norm(layer.attention_norm),
            output_norm=self._norm(layer.output_norm),
            reach=-1 if layer.reach is None else layer.reach,
            rotation=-1 if layer.theta is None else self._thetas.index(layer.theta),
        )

    def _matrix(self, linear: nn.Linear) -> dict[str, Any]:
        width = self._library.encoder_columns()
        num_panels = -(-linear.out_features // width)
        bias = torch.zeros(num_panels * width)
        if linear.bias is not None:
            bias[: linear.out_features] = linear.bias.detach()
        shape = {"bias": self._keep(bias), "K": linear.in_features, "N": linear.out_features}
        weight = linear.weight.detach().contiguous()
        if self.weights == "int8":
            codes, scales = (self._keep(each) for each in pack_codes(weight, width))
            return {**shape, "panels": None, "codes": codes, "scales": scales}
        panels = torch.empty(num_panels, linear.in_features, width)
        advise_huge_pages(panels.data_ptr(), panels.nbytes)
        self._library.encoder_pack(weight.data_ptr(), panels.data_ptr(), linear.in_features, linear.out_features)
        return {**shape, "panels": self._keep(panels), "codes": None, "scales": None}

    def _norm(self, norm: nn.Module) -> dict[str, Any]:
        tensors = (getattr(norm, name, None) for name in ("weight", "bias"))
        weight, bias = (None if each is None else self._keep(each.detach().contiguous()) for each in tensors)
        return {"weight": weight, "bias": bias}

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight as GGUF's q8_0 does, with scales in fp32.

    Args:
        weight: fp32 [N, K], K a multiple of :data:`GROUP`.

    Returns:
        Codes from -127 to 127 in fp32 [N, K], and scales [N, K / 32].

    Raises:
        InvalidInputError: A value is not finite.
    """
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    if not scales.isfinite().all():
        raise InvalidInputError("a weight that is not finite has no int8 codes: leave --weights int8 out")
    codes = (groups / scales.clamp(min=1e-30)[..., None]).round().clamp(-127, 127)
    return codes.reshape(weight.shape), scales


def pack_codes(weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Quantise a weight and pack it for int8 products.

    Args:
        weight: fp32 [N, K].
        width: Columns of a panel.

    Returns:
        Codes with 128 added, uint8 [panels, K / 4, width, 4], and scales, fp32 [panels, K / 32, width]. Columns beyond
        the last have scales of 0.
    """
    codes, scales = quantised(weight)
    rest = -len(weight) % width
    codes = torch.nn.functional.pad(codes + 128, (0, 0, 0, rest), value=128).to(torch.uint8)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, rest))
    return (
        codes.reshape(-1, width, weight.shape[1] // 4, 4).transpose(1, 2).contiguous(),
        scales.reshape(-1, width, weight.shape[1] // GROUP).transpose(1, 2).contiguous(),
    )


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * max(1, len(tensors)))(*(each.data_ptr() for each in tensors))

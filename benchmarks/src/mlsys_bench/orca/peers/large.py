"""Write GGUF files with billions of parameters in 4 and 8 bits, in seconds: random blocks, no float model.

Speed does not depend on the values, and two programs that read the same blocks compute the same, so greedy answers can
be compared first. Every row of the embedding is random but those of the end token and of single bytes
(:mod:`.models` says why).

    python -m mlsys_bench.orca.peers.large --shape 1b --kind q4_0      .peers/models/llama-1b-q4_0.gguf
    python -m mlsys_bench.orca.peers.large --shape 3b --kind q4_k_m
    python -m mlsys_bench.orca.peers.large --shape granite-1b          with recurrent layers
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlsys_bench.orca.peers.models import FOLDER, NUM_SILENT_TOKENS, SEED, vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

Bytes = NDArray[np.uint8]
VOCABULARY_SIZE = 32000
CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama, or of a Granite 4 with recurrent layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    attending: tuple[int, ...] | None = None  # layers that attend; None: all

    @property
    def architecture(self) -> str:
        """Return its name among GGUF's architectures."""
        return "llama" if self.attending is None else "granitehybrid"

    @property
    def recurrent_layers(self) -> list[int]:
        """Return the numbers of the layers that do not attend."""
        return [] if self.attending is None else [at for at in range(self.num_layers) if at not in self.attending]

    @property
    def num_values(self) -> int:
        """Return the features of a recurrent layer's values."""
        return 2 * self.hidden_size


STATE_SIZE, STATE_HEAD_DIM, NUM_TAPS = 128, 64, 4  # of recurrent layers: Granite 4's
SHAPES = {
    "tiny": Shape(2, 4, 2, 64, 256, 512),  # for tests
    "1b": Shape(22, 32, 4, 64, 2048, 5632),  # TinyLlama's
    "3b": Shape(28, 24, 8, 128, 3072, 8192),  # Llama 3.2's
    "8b": Shape(32, 32, 8, 128, 4096, 14336),  # Llama 3.1's
    "granite-tiny": Shape(3, 4, 2, 64, 256, 512, attending=(1,)),  # for tests
    "granite-1b": Shape(40, 12, 4, 128, 1536, 4096, attending=(5, 15, 25, 35)),  # Granite 4.0 H 1B's
}


def _halves(value: float, count: int) -> Bytes:
    return np.full((count, 1), value, dtype="<f2").view(np.uint8)


def _random(random: np.random.Generator, *shape: int) -> Bytes:
    return random.integers(0, 256, shape, dtype=np.uint8)


# Blocks [count, nbytes] whose values have about the standard deviation `size`.
def _q4_0(random: np.random.Generator, count: int, size: float) -> Bytes:
    return np.hstack([_halves(size / 4.6, count), _random(random, count, 16)])


def _q8_0(random: np.random.Generator, count: int, size: float) -> Bytes:
    return np.hstack([_halves(size / 74, count), _random(random, count, 32)])


def _q4_k(random: np.random.Generator, count: int, size: float) -> Bytes:
    factors = [_halves(size / 250, count), _halves(7.5 * size / 250, count)]
    return np.hstack([*factors, _random(random, count, 12 + 128)])


def _q6_k(random: np.random.Generator, count: int, size: float) -> Bytes:
    return np.hstack([_random(random, count, 208), _halves(size / 1370, count)])


BLOCKS: dict[str, Callable[[np.random.Generator, int, float], Bytes]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
KINDS = ("q4_0", "q8_0", "q4_k_m")


def type_of(tensor: str, layer: int, num_layers: int, kind: str) -> str:
    """Return the type of a matrix in a file of that kind, as llama.cpp's own quantiser chooses it.

    Example:
        >>> type_of("attn_v", 0, 32, "q4_k_m"), type_of("attn_v", 5, 32, "q4_k_m"), type_of("output", 0, 32, "q8_0")
        ('Q6_K', 'Q4_K', 'Q8_0')
    """
    if kind == "q8_0":
        return "Q8_0"
    eighth = num_layers // 8
    takes_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    if tensor == "output" or (kind == "q4_k_m" and tensor in ("attn_v", "ffn_down") and takes_more):
        return "Q6_K"
    return "Q4_K" if kind == "q4_k_m" else "Q4_0"


def matrices(shape: Shape) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    """Yield each matrix: its name, kind of tensor, layer and shape (rows, columns)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", "token_embd", 0, (VOCABULARY_SIZE, hidden)
    attention = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
    attention |= {"attn_output": (hidden, queries)}
    values = shape.num_values
    recurrence = {
        "ssm_in": (2 * values + 2 * STATE_SIZE + values // STATE_HEAD_DIM, hidden),
        "ssm_out": (hidden, values),
    }
    mlp = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for layer in range(shape.num_layers):
        branch = recurrence if layer in shape.recurrent_layers else attention
        for tensor, size in (branch | mlp).items():
            yield f"blk.{layer}.{tensor}.weight", tensor, layer, size
    yield "output.weight", "output", 0, (VOCABULARY_SIZE, hidden)


def write(shape: Shape, kind: str, path: Path) -> int:
    """Write a file of one of :data:`KINDS`; return its number of parameters."""
    import gguf

    random, count = np.random.default_rng(SEED), 0
    writer = gguf.GGUFWriter(path, shape.architecture, use_temp_file=True)
    _add_metadata(writer, shape)
    for name, tensor, layer, (rows, columns) in matrices(shape):
        called = type_of(tensor, layer, shape.num_layers, kind)
        stored = gguf.GGMLQuantizationType[called]
        block_len, block_nbytes = gguf.GGML_QUANT_SIZES[stored]
        blocks = BLOCKS[called](random, rows * columns // block_len, 0.7 / columns**0.5)
        data = blocks.reshape(rows, columns // block_len * block_nbytes)
        if tensor in ("token_embd", "output"):
            data[:NUM_SILENT_TOKENS] = 0
        writer.add_tensor(name, data, raw_dtype=stored)
        count += rows * columns
    norms = [f"blk.{layer}.{norm}_norm.weight" for layer in range(shape.num_layers) for norm in ("attn", "ffn")]
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor(name, np.ones(shape.hidden_size, dtype=np.float32))
    for layer in shape.recurrent_layers:
        _add_recurrence(writer, shape, layer, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count


def _add_recurrence(writer: GGUFWriter, shape: Shape, layer: int, random: np.random.Generator) -> None:
    values, heads = shape.num_values, shape.num_values // STATE_HEAD_DIM
    channels = values + 2 * STATE_SIZE
    small = {
        "ssm_conv1d.weight": random.normal(0, 0.5, (channels, NUM_TAPS)),
        "ssm_conv1d.bias": np.zeros(channels),
        "ssm_dt.bias": np.full(heads, -3.0),  # states keep 95 % a token and more
        "ssm_a": -random.uniform(0.1, 1, (heads, 1)),
        "ssm_d": np.ones((heads, 1)),
        "ssm_norm.weight": np.ones((1, values)),
    }
    for name, numbers in small.items():
        writer.add_tensor(f"blk.{layer}.{name}", numbers.astype(np.float32))


def _add_metadata(writer: GGUFWriter, shape: Shape) -> None:
    import gguf

    writer.add_block_count(shape.num_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    if shape.attending is None:
        writer.add_head_count_kv(shape.num_kv_heads)
    else:
        writer.add_head_count_kv([shape.num_kv_heads * (at in shape.attending) for at in range(shape.num_layers)])
        writer.add_rope_scaling_finetuned(False)
        writer.add_ssm_conv_kernel(NUM_TAPS)
        writer.add_ssm_inner_size(shape.num_values)
        writer.add_ssm_state_size(STATE_SIZE)
        writer.add_ssm_time_step_rank(shape.num_values // STATE_HEAD_DIM)
        writer.add_ssm_group_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    tokens, merges = vocabulary(VOCABULARY_SIZE)
    kinds: list[Any] = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)]
    writer.add_vocab_size(VOCABULARY_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def main() -> None:
    """Write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one; repeat")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write; made if missing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.kind or KINDS:
        family = "" if options.shape.startswith("granite") else "llama-"
        path = options.out / f"{family}{options.shape}-{kind}.gguf"
        print(f"{path}: {write(SHAPES[options.shape], kind, path) / 1e6:.0f} M parameters", flush=True)


if __name__ == "__main__":
    main()

"""Cases of the suite ``orca-gpu``: inputs, and rows of kernels and of iterations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from mlsys_core.errors import MlsysError
from mlsys_core.profiling import turns
from mlsys_orca.backends.triton.attention import paged_attention
from mlsys_orca.backends.triton.batch import to_device
from mlsys_orca.backends.triton.decoder import FusedDecoder
from mlsys_orca.backends.triton.plan import tile_shape
from mlsys_orca.backends.triton.rowwise import add_norm, gated, prepare_heads
from mlsys_orca.model.attention import ragged_attention
from mlsys_orca.model.blocks import Attention, Decoder, GatedMLP, PreNormLayer
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.embedding import Embedding
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.model.layers import Linear, RMSNorm, Rotary, rotate
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from torch import Tensor
from torch.nn import functional
from triton.testing import do_bench

BLOCK = 16
DTYPE = torch.bfloat16
CONFIG = ModelConfig(  # the shape of Llama 3.2 1B, with a smaller vocabulary
    architecture="llama",
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=32_768,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)
# (new tokens, keys) of each request
ITERATIONS = {
    "decode 1, context 512": [(1, 512)],
    "decode 1, context 16384": [(1, 16_384)],
    "decode 32, context 512": [(1, 512)] * 32,
    "decode 128, context 2048": [(1, 2048)] * 128,
    "prompt of 2048": [(2048, 2048)],
    "chunk of 512 beside decode 64": [(512, 1024)] + [(1, 1024)] * 64,
}
QUICK = ("decode 1, context 512", "decode 32, context 512", "prompt of 2048")
TOLERANCE, TOLERANCE_OF_LOGITS = 0.05, 0.5  # as Row.largest_difference; bf16 rounds by up to 0.004


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel, or a whole iteration, beside torch's operators."""

    what: str
    shape: str
    ours_ms: float  # median
    torch_ms: float  # median
    padded_ms: float | None  # attention only: keys gathered and padded beforehand
    host_ms: float | None  # iterations only: planning, and starting the copy to the device
    largest_difference: float  # over the reference's own size plus its standard deviation


def batch_of(lengths: Sequence[tuple[int, int]]) -> IterationBatch:
    """Build a batch of requests with ``(new tokens, keys)`` each, their blocks scattered."""
    builder, needs = BatchBuilder(), [-(-context // BLOCK) for _, context in lengths]
    order = torch.split(torch.randperm(sum(needs), generator=torch.Generator().manual_seed(0)), needs)
    for number, ((rows, context), blocks) in enumerate(zip(lengths, order, strict=True)):
        ids = [(7919 * number + 31 * position) % CONFIG.vocab_size for position in range(rows)]
        table = tuple(blocks.tolist())
        builder.add(str(number), ids, num_computed_tokens=context - rows, block_table=table, sampling=SamplingParams())
    return builder.build()


def cache_of(lengths: Sequence[tuple[int, int]], device: torch.device, num_layers: int) -> KVCache:
    """Return a cache for ``lengths`` with a random past, the same each time."""
    num_blocks = sum(-(-context // BLOCK) for _, context in lengths)
    cache = KVCache(CONFIG, num_blocks=num_blocks, block_size=BLOCK, dtype=DTYPE, device=device)
    generator = torch.Generator(device).manual_seed(1)
    for layer in range(num_layers):
        for tensor in cache.of_layer(layer):
            tensor.normal_(generator=generator)
    return cache


def difference(ours: Tensor, theirs: Tensor, *, what: str, allowed: float) -> float:
    """Return the largest difference, in the terms of :class:`Row`.

    Raises:
        MlsysError: it is larger than allowed.
    """
    reference = theirs.float()
    found = float(((ours.float() - reference).abs() / (reference.abs() + reference.std())).max())
    if not found <= allowed:
        raise MlsysError(f"{what}: the results differ by {found:.3g} where {allowed} is allowed")
    return found


def medians_ms(works: Sequence[Callable[[], object]], num_rounds: int) -> list[float]:
    """Return the median milliseconds of each over ``num_rounds`` rounds in which all have a turn."""
    times: list[list[float]] = [[] for _ in works]
    for turn in turns.rounds(range(len(works)), num_rounds=num_rounds):
        for number in turn:
            times[number].append(float(do_bench(works[number], rep=50, return_mode="median")))
    return [statistics.median(each) for each in times]


def attention_rows(names: Iterable[str], device: torch.device, rounds: int) -> Iterator[Row]:
    """Yield rows of the ragged kernel on one layer of each iteration."""
    tile = tile_shape(
        num_heads=CONFIG.num_heads, num_kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim, itemsize=DTYPE.itemsize
    )
    for name in names:
        lengths = ITERATIONS[name]
        inputs = ForwardInputs(batch_of(lengths), block_size=BLOCK, device=device)
        batch, spans = to_device(inputs, tile).ragged, inputs.spans
        keys, values = cache_of(lengths, device, 1).of_layer(0)
        query = torch.randn(inputs.batch.num_tokens, CONFIG.num_heads, CONFIG.head_dim, dtype=DTYPE, device=device)
        theirs = ragged_attention(query, keys, values, spans)
        found = difference(paged_attention(query, keys, values, batch), theirs, what=name, allowed=TOLERANCE)
        works: list[Callable[[], object]] = [
            lambda: paged_attention(query, keys, values, batch),  # noqa: B023 - runs before the next name
            lambda: ragged_attention(query, keys, values, spans),  # noqa: B023
        ]
        if len(set(lengths)) == 1:
            padded = _padded(query, keys, values, inputs, lengths[0])
            difference(padded().transpose(1, 2).reshape(theirs.shape), theirs, what=name, allowed=TOLERANCE)
            works.append(padded)
        times = medians_ms(works, rounds)
        yield Row("attention", name, times[0], times[1], times[2] if len(times) > 2 else None, None, found)


def _padded(
    query: Tensor, keys: Tensor, values: Tensor, inputs: ForwardInputs, length: tuple[int, int]
) -> Callable[[], Tensor]:
    """Return one call of torch's operator over requests of one length, their keys side by side in memory."""
    rows, context = length
    slots = torch.stack([_all_slots(span.slots, keys.device) for span in inputs.spans])
    k, v = (tensor[slots].transpose(1, 2).contiguous() for tensor in (keys, values))
    q = query.view(len(slots), rows, CONFIG.num_heads, CONFIG.head_dim).transpose(1, 2)
    is_causal = rows == context
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _all_slots(slots: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(slots.start, slots.stop, device=device) if isinstance(slots, slice) else slots


def operator_rows(num_tokens: int, device: torch.device, rounds: int) -> Iterator[Row]:
    """Yield rows of the kernels around attention, on ``num_tokens`` rows."""
    shape, hidden, inner = f"{num_tokens} tokens", CONFIG.hidden_size, CONFIG.intermediate_size
    x, weight = torch.randn(num_tokens, hidden, device=device), torch.rand(hidden, device=device)
    branch = torch.randn(num_tokens, hidden, dtype=DTYPE, device=device)

    def add_and_norm(x: Tensor) -> Tensor:
        return functional.rms_norm(x + branch, (hidden,), weight, CONFIG.norm_eps).to(DTYPE)

    def add_norm_fused(x: Tensor) -> Tensor:
        return add_norm(x, branch, weight=weight, eps=CONFIG.norm_eps, is_centred=False, dtype=DTYPE)

    found = difference(add_norm_fused(x.clone()), add_and_norm(x), what="norm", allowed=TOLERANCE)
    times = medians_ms([lambda: add_norm_fused(x), lambda: add_and_norm(x)], rounds)
    yield Row("addition and RMSNorm", shape, times[0], times[1], None, None, found)

    gate_up = torch.randn(num_tokens, 2 * inner, dtype=DTYPE, device=device)

    def gate_then_multiply() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    found = difference(gated(gate_up, activation="silu"), gate_then_multiply(), what="gate", allowed=TOLERANCE)
    times = medians_ms([lambda: gated(gate_up, activation="silu"), gate_then_multiply], rounds)
    yield Row("SiLU gate", shape, times[0], times[1], None, None, found)

    heads, kv_heads = CONFIG.num_heads, CONFIG.num_kv_heads
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, CONFIG.head_dim, dtype=DTYPE, device=device)
    factors = Rotary(CONFIG, device=device)(torch.arange(num_tokens, device=device))
    slots = torch.randperm(num_tokens, device=device)
    cache = cache_of([(num_tokens, num_tokens)], device, 1)
    keys, values = cache.of_layer(0)

    def turn_and_write() -> Tensor:
        rotated = rotate(qkv[:, : heads + kv_heads], *factors)
        cache.write(0, slots, rotated[:, heads:], qkv[:, heads + kv_heads :])
        return rotated[:, :heads]

    def prepare() -> Tensor:
        return prepare_heads(qkv, keys, values, slots, num_heads=heads, rotary=factors)

    found = difference(prepare(), turn_and_write(), what="rotary", allowed=TOLERANCE)
    times = medians_ms([prepare, turn_and_write], rounds)
    yield Row("rotary and K/V write", shape, times[0], times[1], None, None, found)


def decoder_of(device: torch.device) -> Decoder:
    """Return a decoder of :data:`CONFIG` with random weights, the same each time."""
    generator = torch.Generator(device).manual_seed(2)
    hidden, inner, heads = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_heads * CONFIG.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=DTYPE, device=device)
        return weight.normal_(0, columns**-0.5, generator=generator)

    def norm() -> RMSNorm:
        return RMSNorm(torch.ones(hidden, device=device), eps=CONFIG.norm_eps, dtype=DTYPE)

    table = matrix(CONFIG.vocab_size, hidden)
    layers = [
        PreNormLayer(
            attention_norm=norm(),
            attention=Attention(
                CONFIG,
                index,
                qkv=Linear(matrix(heads + 2 * CONFIG.num_kv_heads * CONFIG.head_dim, hidden)),
                output=Linear(matrix(hidden, heads)),
            ),
            mlp_norm=norm(),
            mlp=GatedMLP(Linear(matrix(2 * inner, hidden)), Linear(matrix(hidden, inner)), activation="silu"),
        )
        for index in range(CONFIG.num_layers)
    ]
    return Decoder(
        CONFIG,
        embedding=Embedding(table),
        layers=layers,
        norm=norm(),
        head=Linear(table),
        rotary=Rotary(CONFIG, device=device),
        dtype=DTYPE,
        device=device,
    )


def iteration_rows(names: Iterable[str], device: torch.device, repeats: int) -> Iterator[Row]:
    """Yield rows of whole iterations: the same decoder on the kernels and on torch's operators."""
    ours, torchs = FusedDecoder(decoder_of(device)), decoder_of(device)
    for name in names:
        lengths = ITERATIONS[name]
        batch, cache = batch_of(lengths), cache_of(lengths, device, CONFIG.num_layers)

        def run(model: FusedDecoder | Decoder) -> tuple[Tensor, float]:
            """Return the logits and the milliseconds until they are there."""
            torch.cuda.synchronize()
            begin = time.perf_counter()
            inputs = ForwardInputs(batch, block_size=BLOCK, device=device)  # noqa: B023 - runs before the next name
            logits: Tensor = model(inputs, cache)  # noqa: B023
            torch.cuda.synchronize()
            return logits, (time.perf_counter() - begin) * 1e3

        def plan() -> float:
            begin = time.perf_counter()
            to_device(ForwardInputs(batch, block_size=BLOCK, device=device), ours.tile)  # noqa: B023
            return (time.perf_counter() - begin) * 1e3

        for model in (ours, torchs):  # compiles, tunes, and fills the allocator's pools
            run(model)
        found = difference(run(ours)[0], run(torchs)[0], what=name, allowed=TOLERANCE_OF_LOGITS)
        times = [(run(ours)[1], run(torchs)[1], plan()) for _ in range(repeats)]
        ours_ms, torch_ms, host_ms = (statistics.median(each) for each in zip(*times, strict=True))
        yield Row("iteration", name, ours_ms, torch_ms, None, host_ms, found)

"""Cost of each form of weights for a model: memory, and the change of its predictions from those in fp32.

A text is read as one prompt, and every next token's distribution is compared: the mean negative log-likelihood of the
next token, the mean Kullback-Leibler divergence from fp32, and the share of equal likeliest tokens.

A GGUF's weights have been quantised once, in groups of neighbouring features. Quantised again in the same groups they
would come out unchanged, and a table of errors would be a table of zeros. So int8 and int4 are measured on the same
model with its features in another order (:class:`Shuffled`), which changes no prediction and meets other groups; each
order is another draw, and the table has the mean of several.

    mlsys bench orca-weights model=FILE.gguf text=FILE.txt orders=5
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model
from mlsys_orca.backends.native.decoder import new_kv_cache, to_native
from mlsys_orca.loading.load import DTYPES, load_model
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.families import model_family
from mlsys_orca.model.weights.checkpoint import Cut
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.model.weights.quantized import weights_nbytes
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from torch import Tensor

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

# Own words on several subjects, so that nobody has learned them by heart.
TEXT = """\
The harbour of the old town lies open to the west, so that in winter the storms reach far up the river. Three hundred \
years ago the merchants built a wall of granite blocks across the shallow part of the bay, and left a gap just wide \
enough for two ships to pass. Behind the wall the water is calm even when the waves outside are higher than a house. \
Most of the fishing boats that used to lie there are gone; the few that remain go out before sunrise and come back \
with crabs and mackerel, which are sold from wooden tables along the quay until noon.

Plants take in carbon dioxide from the air and water from the soil, and with the energy of sunlight they turn them \
into sugar and oxygen. This process, which is called photosynthesis, takes place in the chloroplasts of the cells. \
Chlorophyll, the pigment that gives leaves their green colour, absorbs mainly red and blue light. Part of the sugar is \
used at once, and part is stored as starch, so that the plant can live through the night and through the winter, when \
there is little light.

To sort a list of numbers, a program can split the list in two halves, sort each half by the same method, and then \
merge the two sorted halves into one. Merging is simple: compare the first elements of both halves, take the smaller \
one, and repeat until both are empty. Each level of splitting costs as many steps as there are numbers, and there are \
only as many levels as the list can be halved, so the total time grows a little faster than the length of the list. \
For a million numbers this is about twenty million steps.

"I don't think we should leave tonight," said Anna, looking at the clouds over the hills. Her brother laughed and went \
on packing the tent. He had waited the whole summer for this week, and no rain was going to keep him at home. In the \
end they agreed to wait until the morning. When they woke up, the sky was clear, the grass was wet, and the road to \
the lake lay empty in front of them.
"""
FORMS = {
    "fp32": ("fp32", "float"),
    "bf16": ("bf16", "float"),
    "packed": ("fp32", "packed"),
    "packed-bf16": ("bf16", "packed"),
    "int8": ("fp32", "int8"),
    "int4": ("fp32", "int4"),
}


class Shuffled(GgufFile):
    """A Llama-like GGUF, without experts, that computes the same with its features in another order.

    Residual features are ordered anew where they are read (columns, norms) and where they are written (rows); so are
    the MLP's inner features, and the values' features within their head.

    Args:
        path: The file.
        config: Its model's.
        seed: Of the order.
    """

    def __init__(self, path: Path, config: ModelConfig, *, seed: int) -> None:
        super().__init__(path)
        generator = torch.Generator().manual_seed(seed)
        states = torch.randperm(config.hidden_size, generator=generator)
        inner = torch.randperm(config.intermediate_size, generator=generator)
        heads = [torch.randperm(config.head_dim, generator=generator) for _ in range(config.num_kv_heads)]
        shared_by = config.num_heads // config.num_kv_heads
        values = torch.cat([head + i * config.head_dim for i, head in enumerate(heads)])
        attended = torch.cat([heads[i // shared_by] + i * config.head_dim for i in range(config.num_heads)])
        # Role -> order of its rows, order of its columns; a norm has columns only.
        reads: tuple[Tensor | None, Tensor] = None, states
        self._orders: dict[str, tuple[Tensor | None, Tensor | None]] = {
            **dict.fromkeys(
                ("token_embd", "output", "output_norm", "attn_norm", "ffn_norm", "attn_q", "attn_k"), reads
            ),
            "attn_v": (values, states),
            "attn_output": (states, attended),
            "ffn_gate": (inner, states),
            "ffn_up": (inner, states),
            "ffn_down": (states, inner),
        }

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Read a tensor of the file, in this order."""
        if cut is not None:
            raise InvalidInputError("a model in another order is read whole")
        super().read_into(name, out)
        rows, columns = self._orders.get(name.split(".")[-2], (None, None))
        ordered = out if rows is None else out[rows]
        out.copy_(ordered if columns is None else ordered[..., columns].clone())


@dataclass(frozen=True, slots=True)
class Row:
    """One form of weights."""

    weights: str
    mebibytes: float  # of all weights; a table that is head too is counted once
    nll: float  # mean, nats a token
    nll_change: float  # relative to fp32
    divergence: float  # mean, nats a token
    agreement: float  # share of tokens whose likeliest successor is fp32's


def log_probabilities(model: DecoderModel, token_ids: list[int]) -> Tensor:
    """Return the log-probabilities of every next token: fp32 [num_tokens, vocab_size]."""
    builder = BatchBuilder()
    cache = new_kv_cache(model, num_blocks=len(token_ids) // 16 + 1)
    table = tuple(range(len(token_ids) // 16 + 1))
    builder.add("text", token_ids, num_computed_tokens=0, block_table=table, sampling=SamplingParams())
    with torch.inference_mode():
        inputs = ForwardInputs(builder.build(), block_size=16, device="cpu", wanted=range(len(token_ids)))
        return model(inputs, cache).log_softmax(-1)


def nll(found: Tensor, token_ids: list[int]) -> float:
    """Return the mean negative log-likelihood of each token after the first."""
    return -found[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).mean().item()


def divergence(found: Tensor, exact: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of ``found`` from ``exact``, [num_tokens, vocab_size] each."""
    return (exact.exp() * (exact - found)).sum(-1).mean().item()


def measure(path: Path, text: str, *, forms: Sequence[str], orders: int) -> list[Row]:
    """Measure all ``forms`` on ``text``, against fp32."""
    loaded = load_model(path, dtype="fp32", backend="torch")
    token_ids = loaded.tokenizer.encode(text)
    exact = log_probabilities(to_native(loaded.model, activations="float"), token_ids)
    family, expected, rows = model_family(loaded.config.architecture), nll(exact, token_ids), []
    for form in forms:
        dtype, weights = FORMS[form]
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "device": torch.device("cpu"), "weights": weights}
        is_requantised = weights in ("int8", "int4")
        draws = []
        for seed in range(orders if is_requantised else 1):
            checkpoint = Shuffled(path, loaded.config, seed=seed) if is_requantised else GgufFile(path)
            model: Any = family.load(loaded.config, checkpoint, **options)
            size = weights_nbytes(model) / 2**20
            found = log_probabilities(to_native(model, activations="float"), token_ids)
            agreement = (found.argmax(-1) == exact.argmax(-1)).float().mean().item()
            draws.append((nll(found, token_ids), divergence(found, exact), agreement))
        means = [statistics.mean(values) for values in zip(*draws, strict=True)]
        rows.append(Row(form, size, means[0], means[0] / expected - 1, *means[1:]))
    return rows


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    text: str = "",
    weights: tuple[str, ...] = tuple(FORMS),
    orders: int = 3,
) -> Section:
    """Measure each form of weights.

    Args:
        context: The suite's context.
        model: A name or a GGUF file, Llama-like.
        text: A file to read; empty: four paragraphs of our own.
        weights: Names in :data:`FORMS`.
        orders: Orders of features for int8 and int4.
    """
    path = resolve_model(model, settings().cache_dir)
    if context.is_quick:
        weights, orders = weights[:2], 1
    rows = measure(path, Path(text).read_text() if text else TEXT, forms=weights, orders=orders)
    return rows_section("Orca: forms of weights", rows, model=model, orders=orders)

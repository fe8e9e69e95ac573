"""Any decoder that ``transformers`` has, over our flattened batch and ragged attention: the path without a family.

The modules compute everything but attention on ``[1, num_tokens]`` ids and positions; attention writes the new keys
and values to the engine's cache and reads them from there, so a batch is as ragged as anywhere (ORCA, section 3.2). An
iteration takes about twice a forward of our own (docs/adr/0004), so the families that people serve most have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.transformers.attention import RAGGED, answered_by
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.model.layers import Linear
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from mlsys_serving.isolation import Kind, require_isolated
from torch import Tensor, nn

# Of the distance between the logits of both attentions, by the spread of the logits; what rounding explains.
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.2}


class TransformersDecoder:
    """A ``transformers`` model as a :class:`~mlsys_orca.model.decoder.DecoderModel`.

    Args:
        module: The model with its head, its attention set to :data:`~.attention.RAGGED`. Its linear
            layers are replaced by our prepacked ones.
        config: Its configuration, for the engine.
        options: Options of each layer's attention.
        dtype: Dtype of weights, keys and values.
        device: Where they are.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ModelConfig,
        *,
        options: tuple[AttentionOptions, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.module: Any = module
        self.config = config
        self.dtype = dtype
        self.device = device
        self._options = options
        self._takes_rows = "logits_to_keep" in signature(module.forward).parameters
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, Linear(child.weight.detach(), _detached(child.bias)))

    def __call__(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size]."""

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, __: Mapping[str, Any]
        ) -> Tensor:
            layer: Any = module.layer_idx
            keys, values = kv_cache.write(layer, inputs.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
            rows = query[0].transpose(0, 1).contiguous()
            return ragged_attention(rows, keys, values, inputs.spans, self._options[layer]).view(1, *rows.shape)

        num_sampled = len(inputs.sampled_rows)
        rows = inputs.sampled_rows if num_sampled else inputs.slots.new_zeros(1)  # a product of no rows is no product
        kept = {"logits_to_keep": rows} if self._takes_rows else {}
        with answered_by(attend):
            out = self.module(input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], **kept)
        logits: Tensor = out.logits[0] if kept else out.logits[0, rows]
        return logits[:num_sampled].float()

    @torch.inference_mode()
    def verify(self) -> None:
        """See that two short requests in one batch, then their last tokens, give what the model's own attention does.

        The trace of a model's shapes does not show everything that may mix tokens; this does.

        Raises:
            InvalidInputError: they do not.
        """
        # The second, longer one shows positions that are counted from the first row of the batch.
        sequences = [[(7 * i + 3) % self.config.vocab_size for i in range(length)] for length in (5, 13)]
        cache = KVCache(self.config, num_blocks=2, block_size=16, dtype=self.dtype, device=self.device)
        before = self._logits([sequence[:-1] for sequence in sequences], [0, 0], cache)
        last = self._logits([sequence[-1:] for sequence in sequences], [4, 12], cache)
        ours = torch.cat((before[:4], last[:1], before[4:], last[1:]))
        self.module.set_attn_implementation("eager")
        rows = [torch.tensor([sequence], device=self.device) for sequence in sequences]
        theirs = torch.cat([self.module(input_ids=row).logits[0].float() for row in rows])
        self.module.set_attn_implementation(RAGGED)
        spread = (theirs - theirs.mean(dim=-1, keepdim=True)).norm(dim=-1)
        distance = float(((ours - theirs).norm(dim=-1) / spread).median())
        if not distance < _TOLERANCES[self.dtype]:
            raise InvalidInputError(
                f"the architecture {self.config.architecture!r} can't be served: over a ragged batch it does not give "
                f"what it does by its own attention; logits differ by {distance:.2g} of their spread, where "
                f"{_TOLERANCES[self.dtype]} is allowed"
            )
        self._require_isolated()

    def _require_isolated(self) -> None:
        """See by value that no request's logits depend on others of its batch: core's check, as for other executors.

        Raises:
            InvalidInputError: They do, as where experts take no more than so many tokens of a batch.
        """

        def draw(rng: np.random.Generator, kind: Kind) -> np.ndarray[Any, np.dtype[np.int64]] | None:
            if kind not in (Kind.ORDINARY, Kind.OTHER_LENGTH):
                return None
            return rng.integers(0, self.config.vocab_size, 5 if kind is Kind.ORDINARY else 9)

        def answers(requests: list[Any]) -> list[list[Any]]:
            cache = KVCache(self.config, num_blocks=len(requests), block_size=16, dtype=self.dtype, device=self.device)
            logits = self._logits([request.tolist() for request in requests], [0] * len(requests), cache)
            rows = torch.split(logits.cpu(), [len(request) for request in requests])
            return [[row.numpy()] for row in rows]

        has_experts = any("expert" in name for name, _ in self.module.named_modules())
        require_isolated(
            f"the architecture {self.config.architecture!r}",
            answers,
            draw,
            largest=8,
            is_short=True,
            is_exact=not has_experts,  # as many tokens as chose it go through an expert at once
            tolerance=_TOLERANCES[self.dtype],
        )

    def _logits(self, tokens: list[list[int]], starts: list[int], cache: KVCache) -> Tensor:
        """Return the logits of every token in turn; request i has block i and computed ``starts[i]`` tokens before."""
        builder = BatchBuilder()
        for i, (new, start) in enumerate(zip(tokens, starts, strict=True)):
            builder.add(str(i), new, num_computed_tokens=start, block_table=(i,), sampling=SamplingParams())
        everything = range(sum(map(len, tokens)))
        return self(
            ForwardInputs(builder.build(), block_size=cache.block_size, device=self.device, wanted=everything), cache
        )


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()

"""Shape of an encoder, and of the head that classifies by it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlsys_encoders.models.sentence import SentenceForm

Weights = Literal["float", "int8"]  # number format of the products of packed layers


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Classifier of a text or a pair of texts: a vector, a product with an activation, a product to the labels."""

    labels: tuple[str, ...]  # names, in the order of the logits
    activation: str = "tanh"  # behind the first product; a name of layers.ACTIVATIONS
    pooling: str = "cls"  # vector that the first product takes: "cls" or "mean"
    has_pool_bias: bool = True
    has_norm: bool = False  # a LayerNorm behind the activation
    problem: str | None = None  # problem_type of config.json, which tells scores; None: by the number of labels


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Shape of an encoder. The defaults are BERT's; :mod:`.families` says what other families have instead."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    vocab_size: int = 30522
    max_length: int = 512  # tokens of a request
    layer_norm_eps: float = 1e-12
    form: SentenceForm = field(default_factory=SentenceForm)  # from the last layer to a request's vector
    activation: str = "gelu"  # activation of the MLP; a name of layers.ACTIVATIONS
    has_positions: bool = True  # a learned table of them
    position_offset: int = 0  # row of that table for the first token
    num_token_types: int = 1  # 0: there is no table; 2: the second text of a pair is told apart
    num_buckets: int = 0  # buckets of relative positions, as in T5; 0: none
    thetas: tuple[float, ...] = ()  # base of rotary positions of each layer; empty: none
    reaches: tuple[int | None, ...] = ()  # most tokens between two that see each other, by layer; empty: any
    is_gated: bool = False  # one half of the MLP's first product times the activation of the other
    is_pre_norm: bool = False  # norms before attention and MLP, and one behind the last layer; else after each sum
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    has_norm_bias: bool = True
    head: HeadConfig | None = None  # None: a request gets a vector; else logits

    @property
    def embedding_size(self) -> int:
        """Numbers of a request's answer: of its vector, or its logits."""
        if self.head is not None:
            return len(self.head.labels)
        if self.form.denses:
            return self.form.denses[-1].out_features
        return self.hidden_size * len(self.form.poolings)

    @property
    def max_tokens(self) -> int:
        """Tokens that a text is cut to where it is to be cut."""
        return min(self.form.max_tokens or self.max_length, self.max_length)


BERT_BASE = BertConfig()
BERT_LARGE = BertConfig(hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096)
MINILM = BertConfig(hidden_size=384, num_layers=6, num_heads=12, intermediate_size=1536)

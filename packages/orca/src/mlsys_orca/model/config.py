"""The shape of a decoder, and of an encoder before it: what a family, the K/V cache and the engine need to know.

Between the readers (:mod:`.config_readers` and the families' own), which fill a
:class:`ModelConfig` before any weight is read, and everything that runs the model. Whatever would change the result and
is not implemented is refused by the readers, by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
)

_STATE_ITEMSIZE = 4  # fp32, whatever the model's dtype: errors of a state stay in it


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPart:
    """Sizes of a model's recurrent layers, all alike.

    Such a layer (Mamba-2, 2024; gated delta nets, 2024) keeps no keys and values. It keeps a matrix for each head,
    which every token changes, and the last few inputs of a convolution. A request's states of all these layers are one
    row, its slot, which the scheduler gives and takes back with the request's K/V blocks.
    """

    rule: Literal["decay", "delta"]  # a token adds to its head's state; or first takes what the state has for its key
    layers: tuple[bool, ...]  # [num_layers] whether a layer is recurrent; the others attend
    num_heads: int
    num_groups: int  # of heads that share a key and a query
    head_dim: int  # features of a head's values
    state_size: int  # features of a key
    num_taps: int  # inputs that a convolution sees, the newest included
    norm_eps: float  # of the norm beside the gates, which reads no states
    is_tiled: bool = False  # heads share a key with every num_groups-th head, not with their neighbours

    def __post_init__(self) -> None:
        for name, most in (("num_heads", MAX_HEADS), ("num_groups", MAX_HEADS), ("num_taps", MAX_HEADS)):
            _check(name, getattr(self, name), most)
        for name in ("head_dim", "state_size", "num_channels", "num_values"):
            _check(name, getattr(self, name), MAX_WIDTH)
        if self.num_heads % self.num_groups:
            raise InvalidInputError(f"{self.num_heads} recurrent heads cannot share {self.num_groups} keys")
        if not 0 < self.norm_eps < math.inf:
            raise InvalidInputError(f"the recurrent layers' norm_eps is {self.norm_eps}; it must be above 0 and finite")

    def index(self, layer: int) -> int:
        """Return the number of ``layer`` among the recurrent ones."""
        return sum(self.layers[:layer])

    def kv_index(self, layer: int) -> int:
        """Return the number of ``layer`` among those that keep keys and values."""
        return layer - self.index(layer)

    @property
    def num_values(self) -> int:
        """Features of all heads' values."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Features that pass the convolution: values, keys, queries."""
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def num_kept_inputs(self) -> int:
        """Floats of a layer's convolution that a state has: [num_taps - 1, num_channels]."""
        return (self.num_taps - 1) * self.num_channels

    @property
    def num_floats(self) -> int:
        """Floats of one layer's state: what its convolution keeps, then [num_heads, head_dim, state_size]."""
        return self.num_kept_inputs + self.num_values * self.state_size

    @property
    def num_layers(self) -> int:
        """Recurrent layers."""
        return sum(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of a request's states."""
        return self.num_layers * self.num_floats * _STATE_ITEMSIZE


def _check(name: str, size: object, most: int) -> None:
    if type(size) is not int or not 1 <= size <= most:
        raise InvalidInputError(f"the recurrent layers' {name} is {str(size)[:50]}; it must be from 1 to {most}")


# What files call an activation -> its name here, as in layers.ACTIVATIONS.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class UnsupportedModelError(InvalidInputError):
    """A model needs what one way of running it does not have; another way may.

    Args:
        what: The part, as a noun.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"this model needs {what}, which is not implemented; loading it would give wrong text")
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativePositions:
    """Positions as T5 has them: scores gain a learned number, by head and by the distance's bucket."""

    num_buckets: int  # of a table; where keys may lie on both sides, each side has half of them
    max_distance: int  # tokens; from here on all distances share the last bucket
    by_layer: bool = False  # every layer has a table of its own; False: the first one's is everybody's

    def __post_init__(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 4 or self.max_distance <= self.num_buckets // 2:
            raise InvalidInputError(
                f"{self.num_buckets} buckets for distances up to {self.max_distance} leave none to share: their number "
                "must be a multiple of 4, and half of it below the distance"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPart:
    """The part of an encoder-decoder before its decoder. The encoder shares the decoder's widths and heads."""

    num_layers: int
    start_token_ids: tuple[int, ...]  # what the decoder begins with; a prompt is the encoder's tokens, then these


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPart:
    """Sizes of latent attention, whose one key of rotary_dim + latent features is every head's (DeepSeek-V2, 2024)."""

    query_rank: int | None  # features that queries are made from; None: they are made from the states
    plain_dim: int  # features of a head's query that do not turn, before they meet the latent
    value_dim: int  # features of a head's values

    def __post_init__(self) -> None:
        sizes = {"query_rank": self.query_rank, "plain_dim": self.plain_dim, "value_dim": self.value_dim}
        for name, size in sizes.items():
            if (size is not None or name != "query_rank") and (type(size) is not int or not 1 <= size <= MAX_WIDTH):
                raise InvalidInputError(f"the latent attention's {name} is {str(size)[:50]}; it must be from 1 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """Fields of :class:`~mlsys_orca.model.experts.Choice`, but for the tensor."""

    scoring: Literal["softmax_of_chosen", "softmax", "sigmoid"]
    sums_to_one: bool
    scale: float
    has_preference: bool
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["largest", "two_largest"] = "largest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder; a family reads the fields that its checkpoints can set."""

    architecture: str  # a name of mlsys_orca.model.families.ARCHITECTURES
    vocab_size: int  # tokens
    hidden_size: int  # features of a token's state
    intermediate_size: int  # features inside the MLP, or inside each expert
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; num_heads is a multiple
    head_dim: int  # features per head, even
    max_positions: int  # tokens of context the model was made for
    norm_eps: float  # added to the mean square (RMSNorm) or the variance (LayerNorm)
    activation: str = "silu"  # of the MLP; a name of layers.ACTIVATIONS
    tied_embeddings: bool = False  # the output projection is the embedding table

    rope_theta: float = 10_000.0  # base of the rotary frequencies; unused with learned positions
    rotary_dim: int | None = None  # leading features of a head that turn with the position, even; None: all
    rope_divisors: tuple[float, ...] | None = None  # [rotary_dim / 2] each frequency is divided by its own; None: by 1
    rope_amplitude: float = 1.0  # multiplies the cosines and sines
    local_rope_theta: float | None = None  # base in layers with a window, which divide nothing; None: as in the others
    rotated: tuple[bool, ...] | None = None  # [num_layers] whether positions turn the heads; None: they do

    qk_norm: bool = False  # queries and keys are normalised; of a family where some models have that
    spans_heads: bool = False  # something reads all heads at once, so that ranks cannot share them

    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False

    windows: tuple[int | None, ...] | None = None  # [num_layers] keys a token sees, its own included; None: all
    attention_scale: float | None = None  # multiplies the scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores pass softcap * tanh(score / softcap); None: as they are
    logit_softcap: float | None = None  # as above, of the logits
    logit_scale: float = 1.0  # multiplies the states that enter the head
    embedding_scale: float = 1.0  # multiplies what the embedding table gives

    parallel_residual: bool = False  # attention and MLP read the same state, and are added to it together

    num_experts: int = 0  # MLPs per layer that a router chooses from; 0: one MLP, no router
    num_chosen_experts: int = 0  # MLPs that each token passes
    experts_sum_to_one: bool = True  # their weights do; False: they are those of a softmax over all experts
    shared_expert_size: int | None = None  # features inside an MLP that all tokens pass beside those; None: none
    gate_limit: float | None = None  # clamps experts' gates and factors (clamped SwiGLU); None: as they are
    gate_slope: float = 1.0  # of the sigmoid of clamped gates

    dense: tuple[bool, ...] | None = None  # [num_layers] layers with an MLP in place of experts; None: none is
    dense_size: int | None = None  # features inside those MLPs
    expert_choice: ExpertChoice | None = None  # None: the softmax of the chosen ones' scores, or as above
    latent: LatentPart | None = None  # None: each head has keys and values of its own, or shares them
    recurrent: RecurrentPart | None = None  # None: every layer attends

    relative_positions: RelativePositions | None = None  # None: positions are rotary or learned
    encoder: EncoderPart | None = None  # None: a decoder alone

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - (0 if self.recurrent is None else self.recurrent.num_layers)

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.recurrent is not None and len(self.recurrent.layers) != self.num_layers:
            raise InvalidInputError(f"{self.num_layers} layers are recurrent or not, not {len(self.recurrent.layers)}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InvalidInputError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads: "
                "the first must be a multiple of the second"
            )
        for name, size in (("head dimension", self.head_dim), ("rotary part of a head", self.rotary_dim)):
            if size is not None and (size % 2 or size < 1):
                raise InvalidInputError(f"the {name} is {size}; only even ones are computed here, for every family")
        if self.num_experts and not 1 <= self.num_chosen_experts <= self.num_experts:
            raise InvalidInputError(
                f"a token cannot pass {self.num_chosen_experts} of {self.num_experts} experts; 1 to {self.num_experts}"
            )
        choice = self.expert_choice
        if choice is not None and (
            not 1 <= choice.num_chosen_groups <= choice.num_groups
            or self.num_experts % choice.num_groups
            or self.num_experts // choice.num_groups * choice.num_chosen_groups < self.num_chosen_experts
        ):
            raise InvalidInputError(
                f"{self.num_chosen_experts} of {self.num_experts} experts cannot be chosen from "
                f"{choice.num_chosen_groups} of {choice.num_groups} groups"
            )
        if self.dense is not None and len(self.dense) != self.num_layers:
            raise InvalidInputError(f"{self.num_layers} layers have experts or none, not {len(self.dense)}")
        if self.rotated is not None and len(self.rotated) != self.num_layers:
            raise InvalidInputError(f"{self.num_layers} layers have positions or none, not {len(self.rotated)}")
        if self.windows is not None and (
            len(self.windows) != self.num_layers or any(window is not None and window < 1 for window in self.windows)
        ):
            raise InvalidInputError(
                f"the attention windows {self.windows} do not fit {self.num_layers} layers: "
                "there must be one per layer, of at least one token"
            )


_SIZES = {
    "vocab_size": MAX_VOCAB,
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "num_layers": MAX_LAYERS,
    "num_heads": MAX_HEADS,
    "num_kv_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "rotary_dim": MAX_HEAD_DIM,
    "max_positions": MAX_POSITIONS,
    "shared_expert_size": MAX_WIDTH,
    "dense_size": MAX_WIDTH,
}
_OPTIONAL = frozenset(
    {"rotary_dim", "shared_expert_size", "local_rope_theta", "attention_scale", "attention_softcap"}
    | {"logit_softcap", "gate_limit", "dense_size"}
)
_POSITIVE = (
    "norm_eps",
    "rope_theta",
    "local_rope_theta",
    "rope_amplitude",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "logit_scale",
    "embedding_scale",
    "gate_limit",
    "gate_slope",
)


def _check_sizes(config: ModelConfig) -> None:
    """See that every number of ``config`` is one that a model can have: the last check, whatever file it came from."""
    for name, most in _SIZES.items():
        size = getattr(config, name)
        # A stage of an encoder-decoder may have layers of the encoder alone.
        least = 0 if name == "num_layers" and config.encoder is not None else 1
        if not (size is None and name in _OPTIONAL) and (type(size) is not int or not least <= size <= most):
            raise InvalidInputError(
                f"the model's {name} is {str(size)[:50]}; it must be a whole number from 1 to {most}"
            )
    for name in _POSITIVE:
        number = getattr(config, name)
        is_left_out = number is None and name in _OPTIONAL
        if not is_left_out and not (isinstance(number, int | float) and 0 < number < math.inf):
            raise InvalidInputError(f"the model's {name} is {str(number)[:50]}; it must be above 0 and finite")
    if config.rope_divisors is not None:
        num_pairs = (config.rotary_dim or config.head_dim) // 2
        if len(config.rope_divisors) != num_pairs or not all(0 < each < math.inf for each in config.rope_divisors):
            raise InvalidInputError(
                f"the rotary frequencies need {num_pairs} divisors above 0 and finite, and the model has "
                f"{len(config.rope_divisors)}, from {min(config.rope_divisors, default=0)} to "
                f"{max(config.rope_divisors, default=0)}"
            )


def activation_name(name: object) -> str:
    """Return this package's name for ``name``, an activation as files spell it.

    Raises:
        UnsupportedModelError: it is not implemented.

    Example:
        >>> activation_name("gelu_new")
        'gelu_tanh'
    """
    refuse(
        not isinstance(name, str) or name not in _ACTIVATIONS, f"the activation {name!r} ({', '.join(_ACTIVATIONS)})"
    )
    return _ACTIVATIONS[str(name)]


def refuse(refused: bool, what: str) -> None:
    """Stop the loading of a model that needs ``what``, if it does.

    Raises:
        UnsupportedModelError: ``refused`` is true.
    """
    if refused:
        raise UnsupportedModelError(what)

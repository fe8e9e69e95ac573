"""MPNet (Song et al., 2020): BERT with learned positions and T5's relative ones, and no token types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model.config import RelativePositions, refuse
from mlsys_orca.model.encoder_family import EncoderConfig, EncoderFamily
from mlsys_orca.model.families import bert

_STEMS = {
    "embedding": "mpnet.embeddings.word_embeddings",
    "positions": "mpnet.embeddings.position_embeddings",
    "norm": "mpnet.embeddings.LayerNorm",
    "relative": "mpnet.encoder.relative_attention_bias",
    "q": "mpnet.encoder.layer.{}.attention.attn.q",
    "k": "mpnet.encoder.layer.{}.attention.attn.k",
    "v": "mpnet.encoder.layer.{}.attention.attn.v",
    "o": "mpnet.encoder.layer.{}.attention.attn.o",
    "attention_norm": "mpnet.encoder.layer.{}.attention.LayerNorm",
    "up": "mpnet.encoder.layer.{}.intermediate.dense",
    "down": "mpnet.encoder.layer.{}.output.dense",
    "mlp_norm": "mpnet.encoder.layer.{}.output.LayerNorm",
    "pool": "classifier.dense",
    "score": "classifier.out_proj",
}
_NUM_BUCKETS, _MAX_DISTANCE = 32, 128  # transformers takes these, whatever a file says


def _from_huggingface(raw: Mapping[str, Any]) -> EncoderConfig:
    buckets = raw.get("relative_attention_num_buckets", _NUM_BUCKETS)
    refuse(buckets != _NUM_BUCKETS, f"{buckets} buckets for distances (transformers computes with {_NUM_BUCKETS})")
    positions = RelativePositions(num_buckets=_NUM_BUCKETS, max_distance=_MAX_DISTANCE)
    return replace(bert.FAMILY.from_huggingface(raw), num_token_types=0, relative_positions=positions)


FAMILY = EncoderFamily(
    from_huggingface=_from_huggingface,
    stems=_STEMS,
    ignorable_prefixes=("mpnet.pooler.", "pooler.", "lm_head.", "classifier."),
)

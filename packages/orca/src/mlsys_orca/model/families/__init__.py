"""The model families Orca runs with a forward of its own, one file each.

Grow by adding a file and a line here. Imports no torch: the families are lazy references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.lazy import resolve

if TYPE_CHECKING:
    from mlsys_orca.model.family import Family

# What a file calls its architecture (GGUF general.architecture, config.json model_type) -> the family that runs it.
ARCHITECTURES: dict[str, str] = {
    "cohere": "mlsys_orca.model.families.cohere:FAMILY",
    "cohere2": "mlsys_orca.model.families.cohere:COHERE2",
    "command-r": "mlsys_orca.model.families.cohere:FAMILY",
    "deepseek2": "mlsys_orca.model.families.deepseek:FAMILY",
    "deepseek_v2": "mlsys_orca.model.families.deepseek:V2",
    "deepseek_v3": "mlsys_orca.model.families.deepseek:FAMILY",
    "gemma": "mlsys_orca.model.families.gemma:FAMILY",
    "gemma2": "mlsys_orca.model.families.gemma2:FAMILY",
    "gemma3": "mlsys_orca.model.families.gemma3:FAMILY",
    "gemma3_text": "mlsys_orca.model.families.gemma3:FAMILY",
    "glm": "mlsys_orca.model.families.glm:FAMILY",
    "glm4": "mlsys_orca.model.families.glm:GLM4",
    "gpt2": "mlsys_orca.model.families.gpt2:FAMILY",
    "gpt-oss": "mlsys_orca.model.families.gpt_oss:FAMILY",
    "gpt_oss": "mlsys_orca.model.families.gpt_oss:FAMILY",
    "granite": "mlsys_orca.model.families.granite:FAMILY",
    "granitehybrid": "mlsys_orca.model.families.granite_hybrid:FAMILY",
    "granitemoehybrid": "mlsys_orca.model.families.granite_hybrid:FAMILY",
    "llama": "mlsys_orca.model.families.llama:FAMILY",
    "mamba2": "mlsys_orca.model.families.mamba2:FAMILY",
    "mistral": "mlsys_orca.model.families.mistral:FAMILY",
    "mixtral": "mlsys_orca.model.families.mixtral:FAMILY",
    "mt5": "mlsys_orca.model.families.t5:FAMILY",
    "olmo2": "mlsys_orca.model.families.olmo2:FAMILY",
    "phi3": "mlsys_orca.model.families.phi3:FAMILY",
    "qwen2": "mlsys_orca.model.families.qwen2:FAMILY",
    "qwen2_moe": "mlsys_orca.model.families.qwen2_moe:FAMILY",
    "qwen2moe": "mlsys_orca.model.families.qwen2_moe:FAMILY",
    "qwen3": "mlsys_orca.model.families.qwen3:FAMILY",
    "qwen3_moe": "mlsys_orca.model.families.qwen3_moe:FAMILY",
    "qwen35": "mlsys_orca.model.families.qwen3_5:FAMILY",
    "qwen35moe": "mlsys_orca.model.families.qwen3_5:WITH_EXPERTS",
    "qwen3_5_moe_text": "mlsys_orca.model.families.qwen3_5:WITH_EXPERTS",
    "qwen3_5_text": "mlsys_orca.model.families.qwen3_5:FAMILY",
    "qwen3_next": "mlsys_orca.model.families.qwen3_next:FAMILY",
    "qwen3moe": "mlsys_orca.model.families.qwen3_moe:FAMILY",
    "qwen3next": "mlsys_orca.model.families.qwen3_next:FAMILY",
    "smollm3": "mlsys_orca.model.families.smollm3:FAMILY",
    "t5": "mlsys_orca.model.families.t5:FAMILY",
    "umt5": "mlsys_orca.model.families.t5:FAMILY",
}


def model_family(architecture: str) -> Family:
    """Return the family that runs ``architecture``.

    Raises:
        InvalidInputError: none does; the message lists those that are supported.

    Example:
        >>> model_family("llama").stems["gguf"]["q"]
        'blk.{}.attn_q'
    """
    if architecture not in ARCHITECTURES:
        raise InvalidInputError(
            f"the architecture {architecture!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    family: Family = resolve(ARCHITECTURES[architecture])
    return family

"""Model folders of Orca and DVABatch: safetensors, configurations, tokenizers, chat templates, adapters."""

# ruff: noqa: E501 - lists of words

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from mlsys_core.errors import MlsysError

from tests.fuzz.target import Case, Input, Target, read_folder, write_folder
from tests.fuzz.targets.gguf import write_gguf_seed

_TEMPLATES = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ 'x' }}{% endif %}"
    "{{ m['content'] | trim }}{% endfor %}{{ tools | tojson if tools is defined and tools }}",
    "{% set ns = namespace(a=0) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}"
    "{{ raise_exception('no') if messages | length > 9 }}{{ strftime_now('%d') }}",
)
_TEMPLATE_WORDS = (
    "{{", "}}", "{%", "%}", "for x in range(10**9)", "'a'*10**10", "10**10**10", "|", "messages", "| join", "| upper",
    ".__class__", ".__mro__", "['__globals__']", "cycler.__init__.__globals__.os.popen('exit 1')", "range(99999999)",
    "%}{% endfor %}", "| indent(99999999)", "| center(999999999)", "| format(1)", "'%999999999d' % 1", "macro a() ",
    "call a() ", "endmacro", "include 'x'", "self", "recursive", "loop(messages)", "lipsum(10000)", "| batch(3, 'x')",
    "'{:>999999999}'.format(1)", "| list", "| map('upper')", "| wordwrap(1)", "| tojson", "| pprint", "| sort", "//0",
    "<<", "~", "strftime_now('%' * 9999)", "raise_exception('x')", "set a = [a]", "break", "continue",
)  # fmt: skip


def chat_template(folder: Path) -> Case:
    """Chat templates of strangers: parsed and rendered."""
    from mlsys_orca.text.chat_template import ChatTemplate

    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello <s>"}]

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        template = ChatTemplate(made.decode(errors="replace"), special_tokens={"bos_token": "<s>"})
        template.render(messages, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])

    return Case([text.encode() for text in _TEMPLATES], parse, _TEMPLATE_WORDS)


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16},
    "vocab_size": 8,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": [1],
}  # fmt: skip

_UNKNOWN = json.dumps(_CONFIG | {"model_type": "olmo"}).encode()


def llama_folder() -> dict[str, bytes]:
    """Return the files of a tiny Llama in Hugging Face's layout, in two shards."""
    import torch
    from safetensors.torch import save

    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (8, 16),
        "model.norm.weight": (16,),
        **{
            f"model.layers.0.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
                "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16),
                "mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,),
            }.items()
        },
    }  # fmt: skip
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    files = {shard: save({name: weights[name] for name in held}) for shard, held in shards.items()}
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {name: shard for shard, held in shards.items() for name in held},
    }
    return files | {
        "config.json": json.dumps(_CONFIG).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1], "temperature": 0.7, "top_p": 0.9}).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
                "chat_template": _TEMPLATES[0],
                "add_bos_token": True,
            }
        ).encode(),
    }


def tokenizer_json() -> bytes:
    """Return a tokenizer of eight words."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    words = ["<s>", "</s>", "a", "b", "c", "d", "[UNK]", "e"]
    made = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.add_special_tokens(["<s>", "</s>", "[UNK]"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore
    return made.to_str().encode()


_CONFIG_WORDS = (
    "model_type", "llama", "qwen2", "mistral", "gemma3_text", "phi3", "gpt2", "bert", "t5", "mixtral", "olmo2", "olmo",
    "rope_scaling", "rope_parameters", "yarn", "dynamic", "longrope", "linear", "default", "factor", "rope_type", "auto_map",
    "head_dim", "layer_types", "sliding_window", "num_experts", "num_local_experts", "quantization_config", "attention_bias",
    "weight_map", "../model.safetensors", "F32", "BF16", "data_offsets", "eos_token_id", "text_config", "torch_dtype",
)  # fmt: skip


def _warm(parse: Callable[[Input], None], made: Input) -> None:
    """Import what an unknown architecture has imported: that takes seconds, once."""
    with contextlib.suppress(MlsysError):
        parse(made)


def huggingface_folder(folder: Path) -> Case:
    """Directories in Hugging Face's layout: configuration, index, shards, tokenizer files."""
    from mlsys_orca.loading.load import load_model

    work = folder / "made"

    def parse(made: Input) -> None:
        load_model(write_folder(made, work), dtype="fp32", backend="torch", num_threads=1)

    _warm(parse, llama_folder() | {"config.json": _UNKNOWN})
    return Case([llama_folder()], parse, _CONFIG_WORDS)


def config_json(folder: Path) -> Case:
    """``config.json`` alone: the rest of the directory is whole."""
    from mlsys_orca.loading.load import load_model

    work = write_folder(llama_folder(), folder / "made")

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        (work / "config.json").write_bytes(made)
        load_model(work, dtype="fp32", backend="torch", num_threads=1)

    _warm(parse, _UNKNOWN)
    return Case([json.dumps(_CONFIG).encode()], parse, _CONFIG_WORDS)


def tokenizer_files(folder: Path) -> Case:
    """``tokenizer.json`` and ``tokenizer_config.json``, read and used."""
    from mlsys_orca.loading.load import load_model

    whole = llama_folder()
    work = write_folder(whole, folder / "made")
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

    def parse(made: Input) -> None:
        assert isinstance(made, dict)
        for name in names:
            if name in made:
                (work / name).write_bytes(made[name])
            else:
                (work / name).unlink(missing_ok=True)
        loaded = load_model(work, dtype="fp32", backend="torch", num_threads=1)
        ids = loaded.tokenizer.encode("a b <s> é")
        loaded.tokenizer.decode(ids[:8])

    words = ("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Replace", "Regex", "(a+)+$", "(a|a)*b", "Split", "NFKC",
             "added_tokens", "Sequence", "TemplateProcessing", "chat_template", "bos_token", "merges", "vocab", "Precompiled")  # fmt: skip
    return Case([{name: whole[name] for name in names}], parse, words)


def adapter_folder(folder: Path) -> Case:
    """PEFT directories of LoRA adapters."""
    from mlsys_orca.loading.load import load_model
    from mlsys_orca.model.adapters import AdaptedDecoder

    from tests.orca.test_adapters import write_adapter

    loaded = load_model(write_gguf_seed(folder), dtype="fp32", backend="torch", num_threads=1)
    write_adapter(folder / "seed", 0, ["self_attn.q_proj", "mlp.down_proj"])
    work = folder / "made"

    def parse(made: Input) -> None:
        import copy

        AdaptedDecoder(copy.deepcopy(loaded.model), {"a": write_folder(made, work)})

    return Case([read_folder(folder / "seed")], parse, ("lora_alpha", "use_dora", "LORA", "use_rslora", "rank_pattern"))


def encoder_folder(folder: Path) -> Case:
    """Directories of BERT-like encoders, by DVABatch."""
    from mlsys_encoders.models.bert_folder import load_bert

    files = bert_folder()
    work = folder / "made"

    def parse(made: Input) -> None:
        path = write_folder(made, work)
        load_bert(path, num_stages=1)

    words = (
        "bert",
        "gelu",
        "mean",
        "cls",
        "pooling_mode_cls_token",
        "roberta",
        "distilbert",
        "modules.json",
        "1_Pooling",
    )
    return Case([files], parse, words)


def bert_folder() -> dict[str, bytes]:
    """Return the files of a tiny encoder."""
    import torch
    from safetensors.torch import save

    raw = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1,
           "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 8, "type_vocab_size": 2,
           "layer_norm_eps": 1e-12, "hidden_act": "gelu", "position_embedding_type": "absolute"}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (8, 16), "embeddings.position_embeddings.weight": (8, 16),
        "embeddings.token_type_embeddings.weight": (2, 16), "embeddings.LayerNorm.weight": (16,),
        "embeddings.LayerNorm.bias": (16,),
    }  # fmt: skip
    for name, rows, columns in (
        ("attention.self.query", 16, 16), ("attention.self.key", 16, 16), ("attention.self.value", 16, 16),
        ("attention.output.dense", 16, 16), ("intermediate.dense", 24, 16), ("output.dense", 16, 24),
    ):  # fmt: skip
        shapes |= {f"encoder.layer.0.{name}.weight": (rows, columns), f"encoder.layer.0.{name}.bias": (rows,)}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        shapes |= {f"encoder.layer.0.{name}.{kind}": (16,) for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
               {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]  # fmt: skip
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    return {
        "config.json": json.dumps(raw).encode(),
        "model.safetensors": save(weights),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": b"{}",
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": json.dumps(pooling).encode(),
    }


TARGETS = (
    Target("chat-template", chat_template, share=16),
    Target("huggingface-folder", huggingface_folder, share=1),
    Target("config-json", config_json, share=2),
    Target("tokenizer-files", tokenizer_files, share=1),
    Target("adapter-folder", adapter_folder, share=1),
    Target("encoder-folder", encoder_folder, share=1),
)

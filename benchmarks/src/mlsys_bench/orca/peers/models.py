"""Make the models for Orca and its peers: equal weights in every format that one of them reads.

A Llama of SmolLM-135M's layers and a GPT-2 of 124 M, with random weights of a fixed seed and a made-up vocabulary (no
hub is asked, speed does not depend on the values). Below the folder:

    llama-fp32/ llama-bf16/             Hugging Face directories
    llama-f32.gguf -bf16.gguf -f16.gguf
    llama-f32-openvino/ -f16-openvino/  OpenVINO IR, where the peer's environment is installed

    python -m mlsys_bench.orca.peers.models                           5 GB below .peers/models
    python -m mlsys_bench.orca.peers.models --model gpt2 --out FOLDER

Three properties make comparisons fair. Every weight is a number that float32, bfloat16 and float16 all hold exactly.
The end token, and all tokens of a single byte, have a zero row in the embedding, which is also the output matrix: their
logit is 0, which is never the largest of tens of thousands, so greedy answers end at the number of tokens asked for at
every server, and every token is text at once. And answers depend on all that was read: see ``INITIALIZER_RANGE``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import string
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODELS, DTYPES = ("llama", "gpt2"), ("bf16", "fp32")
PEERS = Path(".peers")  # folder of the peers' environments
FOLDER = PEERS / "models"
SEED = 0
INITIALIZER_RANGE = 0.06  # with the usual 0.02 a random model repeats one token, whatever it has read
VOCABULARY_SIZE = {"llama": 32000, "gpt2": 50257}
NUM_SILENT_TOKENS = 1 + 256  # the end token and the single bytes, which come first
GGUF_KINDS = ("f32", "bf16", "f16")
OPENVINO_KINDS = {"f32": "fp32", "f16": "fp16"}


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges of a byte-level BPE: the end token, all bytes, words of one to four letters.

    A word has its leading space within, as "Ġ" in this notation, and comes of its beginning and one letter, so text
    made of words is split into just these words: texts and lists of tokens are one to one.

    Example:
        >>> tokens, merges = vocabulary(20_000)
        >>> tokens[0], tokens[257], tokens[300], merges[0], merges[43], len(tokens)
        ('<|endoftext|>', 'Ġa', 'Ġar', ('Ġ', 'a'), ('Ġa', 'r'), 20000)
    """
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    words = (word for length in (1, 2, 3, 4) for word in itertools.product(string.ascii_lowercase, repeat=length))
    merges = [("Ġ" + "".join(word[:-1]), word[-1]) for word in itertools.islice(words, size - len(tokens))]
    return tokens + ["".join(merge) for merge in merges], merges


def build(name: str) -> PreTrainedModel:
    """Build the model ``name`` in float32, its weights held exactly by all three formats."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    ends |= {"initializer_range": INITIALIZER_RANGE, "tie_word_embeddings": True}
    if name == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY_SIZE[name], n_positions=1024, **ends))
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY_SIZE[name],
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                max_position_embeddings=2048,
                **ends,
            )
        )
    with torch.no_grad():
        model.get_input_embeddings().weight[:NUM_SILENT_TOKENS] = 0
        for weight in model.parameters():
            weight[weight.abs() < 2.0**-17] = 0  # below, float16 has fewer bits than bfloat16
            weight.copy_(weight.bfloat16())
    built: PreTrainedModel = model.eval()
    return built


def write_huggingface(model: PreTrainedModel, name: str, folder: Path) -> None:
    """Write the directories ``NAME-fp32`` and ``NAME-bf16``, tokenizer included."""
    import copy

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, merges = vocabulary(model.config.vocab_size)
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = tokens[0]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, pad_token=end)  # type: ignore[no-untyped-call]
    for suffix, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        converted = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]
        converted.save_pretrained(folder / f"{name}-{suffix}")
        tokenizer.save_pretrained(folder / f"{name}-{suffix}")


def write_gguf(model: PreTrainedModel, name: str, kind: str, path: Path) -> None:
    """Write GGUF like llama.cpp's own converter.

    It uses other names, interleaves Llama's rotary halves and transposes GPT-2's matrices.

    Args:
        model: In float32.
        name: One of ``MODELS``.
        kind: One of ``GGUF_KINDS``, for the matrices; vectors stay float32.
        path: The file to write.
    """
    import gguf

    config = model.config
    architecture = gguf.MODEL_ARCH.GPT2 if name == "gpt2" else gguf.MODEL_ARCH.LLAMA
    stored = {
        "f32": gguf.GGMLQuantizationType.F32,
        "bf16": gguf.GGMLQuantizationType.BF16,
        "f16": gguf.GGMLQuantizationType.F16,
    }[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if name == "llama":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    else:
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    tokens, merges = vocabulary(config.vocab_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for source, weight in model.state_dict().items():
        if source == "lm_head.weight":  # tied
            continue
        values = weight.numpy()
        if name == "gpt2" and ".c_" in source and values.ndim == 2:
            values = values.T
        if "q_proj" in source or "k_proj" in source:
            head_dim = config.hidden_size // config.num_attention_heads
            values = values.reshape(-1, 2, head_dim // 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        held_as = stored if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        target = names.get_name(source, (".weight", ".bias"))
        writer.add_tensor(str(target), gguf.quants.quantize(values, held_as), raw_dtype=held_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_openvino(name: str, folder: Path, environment: Path) -> None:
    """Write OpenVINO's own export of the float32 directory, by the exporter in the peer's environment."""
    exporter = environment / "bin" / "optimum-cli"
    if not exporter.is_file():
        print(f"{name}: no OpenVINO IR, {exporter} is not installed: benchmarks/peers/install.sh openvino-genai")
        return
    for kind, weight_format in OPENVINO_KINDS.items():
        command = [str(exporter), "export", "openvino", "--model", str(folder / f"{name}-fp32")]
        command += ["--task", "text-generation-with-past", "--weight-format", weight_format]
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, str(folder / f"{name}-{kind}-openvino")], check=True, env={**os.environ, **quiet})


def main() -> None:
    """Write the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write; made if missing")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.model or MODELS:
        model = build(name)
        num_parameters = sum(weight.numel() for weight in model.parameters())
        print(f"{name}: {num_parameters / 1e6:.1f} M parameters", flush=True)
        write_huggingface(model, name, options.out)
        for kind in GGUF_KINDS:
            write_gguf(model, name, kind, options.out / f"{name}-{kind}.gguf")
        write_openvino(name, options.out, options.peers / "openvino-genai")


if __name__ == "__main__":
    main()

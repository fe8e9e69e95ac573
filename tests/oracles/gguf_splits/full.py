"""Tokens of byte-level vocabularies beside llama.cpp's, for every way of cutting text that a GGUF file can name.

``full.py [--write] [NAME ...]``: needs llama.cpp (``benchmarks/peers/install.sh llama-cpp``) and SmolLM2, whose
vocabulary all names are tried with. ``--write`` keeps some of llama.cpp's tokens, which ``test_splits.py`` reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from mlsys_core.models import resolve_model
from mlsys_orca.loading.gguf_tokenizer import DISTINCT_NAMES, PRE_TOKENIZERS, tokenizer_from_gguf
from mlsys_orca.model.weights.gguf_file import GgufFile

from tests.oracles.gguf_splits.texts import texts

PEER = Path(__file__).resolve().parents[3] / ".peers" / "llama-cpp" / "bin" / "python"
KEPT = Path(__file__).with_name("llama_cpp.json")
NUM_TEXTS, NUM_KEPT = 1000, 15
SERVER = """
import json, os, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.port, params.cpuparams.n_threads = sys.argv[1], 64, False, 0, 1
server, found = xllamacpp.Server(params), []
for text in json.load(sys.stdin):
    body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
    request = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
    found.append(json.load(urllib.request.urlopen(request))["tokens"])
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
os._exit(0)
"""


def vocabulary() -> dict[str, Any]:
    """Return the metadata of SmolLM2's tokenizer."""
    return GgufFile(resolve_model("smollm2-135m-instruct", Path("/nonexistent"))).metadata


def _differs_by_design(text: str, name: str) -> bool:
    """Return whether llama.cpp departs from the models' own tokenizers, whose rules are ours.

    It does not compose characters before cutting, and its patterns of capitals have no marks. "default" is left out
    whole: here and in transformers it is GPT-2's way, there a way of no model.
    """
    rules = PRE_TOKENIZERS[name]
    if any(r"\p{Lu}" in split for split in rules.splits):
        return any(unicodedata.category(letter).startswith("M") for letter in text)
    return rules.composes_unicode and unicodedata.normalize("NFC", text) != text


def llama_cpps_tokens(metadata: dict[str, Any], name: str, asked: list[str]) -> list[list[int]]:
    """Return llama.cpp's tokens of texts, for the vocabulary cut as ``name`` says."""
    with tempfile.TemporaryDirectory() as folder:
        model, answers = Path(folder, "model.gguf"), Path(folder, "tokens.json")
        _write(model, metadata, name)
        command = [str(PEER), "-c", SERVER, str(model), str(answers)]
        subprocess.run(command, input=json.dumps(asked), text=True, check=True, capture_output=True)
        found: list[list[int]] = json.loads(answers.read_text())
        return found


def _write(path: Path, metadata: dict[str, Any], name: str) -> None:
    """Write a model of one small layer with that vocabulary."""
    tokens, width = metadata["tokenizer.ggml.tokens"], 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,), "blk.0.attn_norm": (width,)}
    shapes |= {f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (width, width) for part in ("gate", "up", "down")} | {"blk.0.ffn_norm": (width,)}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str]) -> int:
    """Print texts whose tokens differ, and the tally; return 1 if there are any."""
    if not PEER.is_file():
        print("llama.cpp is missing: benchmarks/peers/install.sh llama-cpp", file=sys.stderr)
        return 2
    metadata, kept, num_cases, num_wrong = vocabulary(), {}, 0, 0
    names = [name for name in arguments if name != "--write"] or [name for name in PRE_TOKENIZERS if name != "default"]
    for name in names:
        asked = [text for text in texts(NUM_TEXTS) if not _differs_by_design(text, name)]
        expected = llama_cpps_tokens(metadata, name, asked)
        tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": name})
        num_cases += len(asked)
        for text, tokens in zip(asked, expected, strict=True):
            if tokenizer.encode(text) != tokens:
                num_wrong += 1
                print(f"  wrong: {name}: {text!r}", flush=True)
        if name in DISTINCT_NAMES:
            kept[name] = dict(zip(asked[:NUM_KEPT], expected[:NUM_KEPT], strict=True))
    if "--write" in arguments:
        KEPT.write_text(json.dumps(kept, separators=(",", ":"), sort_keys=True) + "\n")
    num_equal = num_cases - num_wrong
    print(f"gguf_splits: {num_cases:,} cases: {num_equal:,} equal, 0 refused, {num_wrong:,} wrong, 0 raw")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

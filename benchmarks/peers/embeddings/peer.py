"""One peer of ``mlsys bench dvabatch-embeddings``, in an environment of its own: texts on stdin, vectors to files.

    python benchmarks/peers/embeddings/peer.py PEER FOLDER THREADS

A line of stdin is a JSON object with ``texts``, ``batch_size`` and ``out``, a file for the vectors; a line of stdout is
one with ``seconds`` and ``processor_s``. With ``arrivals``, seconds by text, texts come one by one, and the line has
the ``latencies`` of all: what waits runs at once, ``batch_size`` at most, as in a server that waits for no more.

Peers: sentence-transformers (sorts texts by length itself), fastembed (takes them as they come), onnxruntime (the ONNX
file that fastembed gets, texts sorted here: the strongest form of it), openvino (the same file, sorted likewise). The
last two have a form with products in int8 each, the quickest of each: onnxruntime's tool quantises the file, with a
scale for each column and each batch; openvino gets weights in int8 and quantises rows itself, in groups.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Embed = Callable[[list[str], int], np.ndarray[Any, Any]]
LONGEST = 256  # tokens of a text, as the encoder's own sentence-transformers form has it; the rest is cut off
TOKENIZER = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def sentence_transformers(folder: Path, threads: int) -> Embed:
    """Return the encoder as sentence-transformers runs it, on torch."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts, batch_size: model.encode(texts, batch_size=batch_size, show_progress_bar=False)


def exported(folder: Path) -> Path:
    """Return a folder with ``model.onnx`` and the tokenizer's files."""
    import torch
    from transformers import AutoModel

    to = Path(tempfile.mkdtemp(prefix="embeddings-"))
    for name in TOKENIZER:
        if (folder / name).is_file():
            shutil.copy(folder / name, to / name)
    config = to / "tokenizer_config.json"  # fastembed reads the limit there
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": LONGEST}))
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        """The last hidden states alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state

    ids = torch.randint(1000, 2000, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0  # else the export takes it for one that hides nothing
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        States(), (ids, mask, torch.zeros_like(ids)), str(to / "model.onnx"), dynamo=False, input_names=names,
        output_names=["last_hidden_state"], dynamic_axes={name: {0: "batch", 1: "length"} for name in names},
    )  # fmt: skip
    return to


def fastembed(folder: Path, threads: int) -> Embed:
    """Return the encoder as fastembed runs it, on ONNX Runtime."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    to = exported(folder)
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(
        model="local/encoder", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="local/encoder"),
        dim=size, model_file="model.onnx",
    )  # fmt: skip
    model = TextEmbedding("local/encoder", specific_model_path=str(to), threads=threads)
    return lambda texts, batch_size: np.array(list(model.embed(texts, batch_size=batch_size)))


def with_codes(to: Path) -> Path:
    """Quantise ``model.onnx`` in its folder by ONNX Runtime's tool: weights now, rows as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model, prepared = str(to / "model.onnx"), str(to / "prepared.onnx")
    quant_pre_process(model, prepared, skip_symbolic_shape=True)  # which does not get through
    quantize_dynamic(prepared, model, weight_type=QuantType.QInt8, per_channel=True)
    return to


def with_compressed(to: Path) -> Path:
    """Write the weights in a folder's ``model.onnx`` as int8, a scale each column, as OpenVINO multiplies codes."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(str(to / "model.onnx"))
    weights = {each.name: each for each in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            name = node.input[1]
            weight = numpy_helper.to_array(weights[name])
            scales = np.abs(weight).max(0) / np.float32(127)
            codes = np.round(weight / np.maximum(scales, 1e-30)).astype(np.int8)
            model.graph.initializer.remove(weights.pop(name))
            model.graph.initializer.extend(
                [numpy_helper.from_array(codes, f"{name} codes"), numpy_helper.from_array(scales, f"{name} scales")]
            )
            nodes.append(helper.make_node("DequantizeLinear", [f"{name} codes", f"{name} scales"], [name], axis=1))
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(to / "model.onnx"))
    return to


def onnxruntime(folder: Path, threads: int, form: Callable[[Path], Path] = Path) -> Embed:
    """Return the encoder on ONNX Runtime, texts sorted by length, each batch padded to its longest."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    to = form(exported(folder))
    session = ort.InferenceSession(str(to / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return by_length(to, lambda given: session.run(["last_hidden_state"], given)[0])


def openvino(folder: Path, threads: int, form: Callable[[Path], Path] = Path) -> Embed:
    """Return the encoder on OpenVINO, texts sorted by length, each batch padded to its longest."""
    import openvino as ov

    to = form(exported(folder))
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    model = ov.Core().compile_model(str(to / "model.onnx"), "CPU", options)
    return by_length(to, lambda given: model(given, share_inputs=True)[0])


def by_length(folder: Path, states_of: Callable[[dict[str, np.ndarray[Any, Any]]], Any]) -> Embed:
    """Return a function that sorts texts by length, and averages and scales what ``states_of`` gives for a batch."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)

    def embed(texts: list[str], batch_size: int) -> np.ndarray[Any, Any]:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
        found: list[Any] = [None] * len(ids)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            tokens = np.zeros((len(rows), len(ids[rows[0]])), np.int64)
            mask = np.zeros_like(tokens)
            for at, row in enumerate(rows):
                tokens[at, : len(ids[row])] = ids[row]
                mask[at, : len(ids[row])] = 1
            given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
            states = states_of(given)
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            for row, mean in zip(rows, means, strict=True):
                found[row] = mean / np.linalg.norm(mean)
        return np.stack(found)

    return embed


PEERS: dict[str, Callable[[Path, int], Embed]] = {
    "sentence-transformers": sentence_transformers,
    "fastembed": fastembed,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "onnxruntime, int8": lambda folder, threads: onnxruntime(folder, threads, with_codes),
    "openvino, int8": lambda folder, threads: openvino(folder, threads, with_compressed),
}


def served(embed: Embed, texts: list[str], arrivals: list[float], batch_size: int) -> list[float]:
    """Return the seconds between each text's arrival and its vector."""
    began_s, latencies = time.perf_counter(), []
    while (first := len(latencies)) < len(texts):
        time.sleep(max(0.0, arrivals[first] - (time.perf_counter() - began_s)))
        now_s = time.perf_counter() - began_s
        waiting = [at for at in arrivals[first : first + batch_size] if at <= now_s] or [arrivals[first]]
        embed(texts[first : first + len(waiting)], batch_size)
        ended_s = time.perf_counter() - began_s
        latencies += [ended_s - at for at in waiting]
    return latencies


def main() -> None:
    """Answer line by line."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    embed = PEERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"is_ready": True}), file=said, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "arrivals" in asked:
            latencies = served(embed, asked["texts"], asked["arrivals"], asked["batch_size"])
            print(json.dumps({"latencies": latencies}), file=said, flush=True)
            continue
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        vectors = embed(asked["texts"], asked["batch_size"])
        spent = {"seconds": time.perf_counter() - began_s, "processor_s": time.process_time() - began_cpu_s}
        np.save(asked["out"], np.asarray(vectors, np.float32))
        print(json.dumps(spent), file=said, flush=True)


if __name__ == "__main__":
    main()

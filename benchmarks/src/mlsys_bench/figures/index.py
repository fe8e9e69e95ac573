"""List the result files: what each holds, where and when it was measured, and the pages that cite it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mlsys_bench.figures.pages import files_of
from mlsys_bench.figures.results import PROCESSORS, RESULTS, table

_HEAD = """# Results

Written by `make figures`; do not edit by hand. One file for each published table or row of one; a file that no page
cites is deleted. The last part of a name is the processor, two cores of it, or the GPU.

"""
_WHAT = {
    "batchmaker-lstm": "LSTM serving, cellular against bucketed and unpadded batching",
    "batchmaker-quick": "All figures of the paper, small",
    "batchmaker-large": "Seq2Seq and Tree-LSTM at the paper's hidden size",
    "batchmaker-trees-dynet": "Tree-LSTM against DyNet",
    "batchmaker-voice": "Live voices through Silero's detector",
    "batchmaker-words": "Words through g2p-en",
    "dvabatch-embeddings": "Texts to vectors beside other libraries",
    "dvabatch-encoder": "Input diversity: a sentence encoder under each policy",
    "dvabatch-front-triton": "REST and gRPC fronts beside Triton's",
    "dvabatch-over-http": "A sentence encoder behind five servers",
    "dvabatch-vision": "Operator and load diversity: vision nets under each policy",
    "front-clients": "The protocol's front and Triton at 8, 64 and 256 clients",
    "nimble-nasnet-mobile": "A net with branches on a GPU",
    "nimble-training": "Training steps",
    "nimble-zoo": "Nets that nobody tuned for, alone and in company",
    "nimble-bf16": "Nets in bf16 beside peers' bf16",
    "nimble-int8": "Quantised nets beside peers' int8",
    "nimble-dynamic": "One preparation at many sizes",
    "nimble": "Nets against peers",
    "orca-gguf": "One GGUF behind our server and llama.cpp's",
    "orca-gpu": "Triton kernels and iterations beside torch's operators",
    "orca-paper": "The ORCA paper's comparison",
    "orca-peers-offline": "Serving against peers, all requests at once",
    "orca-peers-online": "Serving against peers, Poisson arrivals",
    "windtunnel-coverage": "What translates, beside skl2onnx and Hummingbird",
    "windtunnel-infer": "Exact answers against peers",
    "windtunnel-public": "Fine-tuning and members beside a tuned LightGBM",
    "windtunnel-tables": "Tables of the experiments, one line a fit",
}


def page(pages: Mapping[str, str]) -> str:
    """Return the index.

    Args:
        pages: The documentation's texts by path below the repository.
    """
    cited: dict[str, list[str]] = {}
    for path, text in pages.items():
        for name in dict.fromkeys(files_of(text)):
            cited.setdefault(name, []).append(path)
    names = sorted(path.name for path in RESULTS.glob("*.json*"))
    rows = [[f"[{name}]({name})", _what(name), *_origin(name), _links(cited.get(name, []))] for name in names]
    columns = ["file", "what", "processor", "measured", "commit", "page"]
    return _HEAD + table(columns, rows) + "\n"


def _what(name: str) -> str:
    prefix = max((prefix for prefix in _WHAT if name.startswith(prefix)), key=len)
    return _WHAT[prefix]


def _origin(name: str) -> tuple[str, str, str]:
    text = (RESULTS / name).read_text(encoding="utf-8")
    environment = json.loads(text.partition("\n")[0] if name.endswith("l") else text)["environment"]
    title = PROCESSORS[name.partition(".")[0].rpartition("-")[2]]
    return title, environment["time"][:10], environment["commit"][:7]


def _links(paths: list[str]) -> str:
    return ", ".join(f"[{path}](../../{path})" for path in paths)

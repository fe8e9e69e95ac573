"""Fill the marked places of a page, find figures of its text that no table holds, and list the result files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module

from mlsys_bench.figures.results import PROCESSORS, RESULTS, table

_BLOCK = re.compile(r"<!-- figures: (?P<call>[^>]+?)\s*-->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
_SETTINGS = re.compile(r"<!-- settings: (.*?) -->", re.DOTALL)
_FIGURE = re.compile(
    r"(?<![\w./:-])\d*\.\d+(?![\w-])|(?<![\w.])[\d,.]*\d(?= ?(?:%|x\b|ms\b|us\b|µs\b|tokens/s|GFLOP/s))"
)
_HIDDEN = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
_NO_FIGURE = re.compile(
    r"`[^`]*`"  # code
    r"|\b[Gg]oals?\b.*?(?=[;)]|\.\s|$)"
    r"|(?:[Ss]ection|[Ff]igure|[Tt]able)s? [\d.]+(?: and [\d.]+)?"
    r"|\]\([^)]*\)",  # where a link leads
    re.DOTALL,
)


def render(call: str) -> str:
    """Return what ``call`` asks for: a renderer, ``module.function``, and its files."""
    renderer, *files = call.split()
    module, _, function = renderer.partition(".")
    return str(getattr(import_module(f"mlsys_bench.figures.{module}"), function)(*files))


def filled(page: str) -> str:
    """Return a page's text with what its marks ask for written between them."""
    return _BLOCK.sub(_filled, page)


def _filled(block: re.Match[str]) -> str:
    mark = block[0].partition("-->")[0]
    return f"{mark}-->\n\n{render(block['call'])}\n\n<!-- end -->"


def files_of(page: str) -> list[str]:
    """Return the result files that a page's marks name."""
    calls = (block["call"].split()[1:] for block in _BLOCK.finditer(page))
    return [name for call in calls for name in call if ".json" in name]


def loose_figures(page: str) -> Iterator[tuple[str, str]]:
    """Yield each figure of a page's text that none of its tables holds, with its paragraph.

    Looks at sections that have a table of figures, and at paragraphs that cite a benchmark. Left out are code, goals
    ("goal 1.2x"), numbers that the page lists as ``<!-- settings: 0.1, 16 -->``, and paragraphs that say "by hand",
    with what their ":" leads to: what was measured without a file says so, with the command.
    """
    held = set(_FIGURE.findall(" ".join(block["body"] for block in _BLOCK.finditer(page))))
    held.update(re.findall(r"[\d.,]*\d", " ".join(_SETTINGS.findall(page))))
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        for paragraph in _measured(section):
            found = _FIGURE.findall(_NO_FIGURE.sub("", paragraph))
            yield from ((figure, paragraph) for figure in found if figure not in held)


def _measured(section: str) -> Iterator[str]:
    """Yield the paragraphs whose figures a table must hold."""
    has_table = bool(_BLOCK.search(section))
    text = _HIDDEN.sub("", _BLOCK.sub("", section))
    is_exempt = introduces = False
    for paragraph in re.split(r"\n(?:\n|(?=- ))", text):
        is_exempt = "by hand" in paragraph.lower() or (is_exempt and introduces)
        introduces = paragraph.endswith(":")
        if not is_exempt and (has_table or re.search(r"benchmarks/\w+/\w+\.py|mlsys bench \w", paragraph)):
            yield paragraph


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


def index_page(pages: Mapping[str, str]) -> str:
    """Return the index of the results.

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

"""Registers the suites, the subsystems' ``bench`` and the command ``mlsys workload``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import BenchmarkSpec, CommandSpec

# name: (help, function, kinds of device)
SUITES = {
    "core-serving-loop": ("Cost of a batch in the serving loop.", "core.serving_loop:run", ("cpu",)),
    "core-recorder": ("Cost of an event in the recorder.", "core.recorder:run", ("cpu",)),
    "core-memory-plan": ("Peak memory over the lower bound, and planning time.", "core.memory_plan:run", ("cpu",)),
    "core-oip-front": ("Requests a second of the inference protocol's front.", "core.oip_front:run", ("cpu",)),
    "nimble": (
        "Nets of chapter 3 against eager, torch.compile, AOTInductor, ONNX Runtime and OpenVINO.",
        "nimble.nets:run",
        ("cpu", "cuda"),
    ),
    "nimble-dynamic": ("One preparation at many sizes, beside peers with dynamic axes.", "nimble.sizes:run", ("cpu",)),
    "nimble-int8": ("Quantised nets beside ONNX Runtime's and OpenVINO's int8.", "nimble.int8:run", ("cpu",)),
    "nimble-bf16": ("Nets in bf16 beside peers' bf16, with errors.", "nimble.bf16:run", ("cpu",)),
    "nimble-zoo": ("Nets nobody named, of torchvision's and timm's, beside peers.", "nimble.zoo:run", ("cpu",)),
    "nimble-training": ("Training steps beside eager and torch.compile.", "nimble.training:run", ("cpu",)),
    "orca-paper": (
        "The ORCA paper's evaluation: iteration-level against request-level scheduling.",
        "orca.paper_suite:run",
        ("cpu",),
    ),
    "orca-peers": (
        "Servers with the same requests and weights: OpenVINO GenAI, llama.cpp, vLLM.",
        "orca.peers.suite:run",
        ("cpu",),
    ),
    "orca-gguf": ("One GGUF file of 4 or 8 bits behind Orca and its peers, in turn.", "orca.peers.gguf:run", ("cpu",)),
    "orca-weights": ("Memory and predictions of each form of weights.", "orca.weights:run", ("cpu",)),
    "orca-gpu": ("Triton kernels and whole iterations against torch's operators.", "orca.gpu:run", ("cuda",)),
    "orca-soak": ("Many clients, half of whom leave midway: each answer checked.", "orca.soak:run", ("cpu",)),
    "windtunnel-tables": (
        "300,000 flights (dissertation, section 5.4): a pipeline translated and trained, beside other models.",
        "windtunnel.experiments.suite:run",
        ("cpu",),
    ),
    "windtunnel-infer": (
        "Exact inference against scikit-learn, LightGBM, ONNX Runtime, Hummingbird and treelite.",
        "windtunnel.infer:run",
        ("cpu",),
    ),
    "windtunnel-coverage": (
        "What translates, and how exactly, beside skl2onnx and Hummingbird.",
        "windtunnel.coverage.suite:run",
        ("cpu",),
    ),
    "windtunnel-public": (
        "Is fine-tuning above a tuned source on eight public sets?",
        "windtunnel.public:run",
        ("cpu",),
    ),
    "batchmaker": (
        "The BatchMaker paper's figures: cellular against request-level batching.",
        "batchmaker.suite:run",
        ("cpu",),
    ),
    "batchmaker-words": ("Words to phonemes, cellular against bucketed batching.", "batchmaker.words:run", ("cpu",)),
    "batchmaker-voice": (
        "Live voices through Silero's detector: streams against ONNX Runtime and torch.",
        "batchmaker.voice:run",
        ("cpu",),
    ),
    "batchmaker-trees": (
        "Tree-LSTM against DyNet, per-height batching and the ideal graph.",
        "batchmaker.trees:run",
        ("cpu",),
    ),
    "dvabatch": (
        "DVABatch's Figures 14, 16 and 18: policies against ZeroBatch, DelayBatch and the best static batch.",
        "dvabatch.suite:run",
        ("cpu",),
    ),
    "dvabatch-embeddings": (
        "Texts to vectors a second, beside sentence-transformers, fastembed and ONNX Runtime.",
        "dvabatch.embeddings:run",
        ("cpu",),
    ),
    "dvabatch-over-http": ("Running servers over HTTP under Poisson arrivals.", "dvabatch.over_http:run", ("cpu",)),
    "dvabatch-soak": ("Each policy above its capacity: each request checked.", "dvabatch.soak:run", ("cpu",)),
}


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the load generator's command, and the subsystems' ``bench``."""
    about = "Make request traces and drive a server with them."
    yield CommandSpec(name="workload", help=about, app=f"{__package__}.workload.cli:app")
    about = "Simulate request-level batching on given costs."
    yield CommandSpec(name="dvabatch baselines", help=about, app=f"{__package__}.dvabatch.baselines:app")
    for name in ("batchmaker", "dvabatch", "nimble", "orca", "windtunnel"):
        yield CommandSpec(
            name=f"{name} bench", help="Run a suite, as mlsys bench.", app=f"{__package__}.harness.commands:{name}"
        )


@hookimpl
def mlsys_register_benchmarks() -> Iterable[BenchmarkSpec]:
    """Return all suites, by subsystem."""
    return [
        BenchmarkSpec(name=name, help=text, run=f"{__package__}.{run}", devices=devices)
        for name, (text, run, devices) in SUITES.items()
    ]

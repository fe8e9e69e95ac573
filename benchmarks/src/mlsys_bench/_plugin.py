"""Registers the suites of ``mlsys bench``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import BenchmarkSpec

# name: (help, function, kinds of device)
SUITES = {
    "core-serving-loop": ("Cost of a batch in the serving loop.", "core.serving_loop:run", ("cpu",)),
    "core-recorder": ("Cost of an event in the recorder.", "core.recorder:run", ("cpu",)),
    "core-memory-plan": ("Peak memory over the lower bound, and planning time.", "core.memory_plan:run", ("cpu",)),
    "core-oip-front": ("Requests a second of the inference protocol's front.", "core.oip_front:run", ("cpu",)),
    "serve-peers": (
        "Our front beside LitServe, BentoML, Ray Serve and Triton: the same model and clients.",
        "core.serve_peers:run",
        ("cpu",),
    ),
    "core-instances": ("One instance against two, beside a single process.", "core.instances:run", ("cpu",)),
    "nimble": (
        "Nets of chapter 3 against eager, torch.compile, AOTInductor, ONNX Runtime and OpenVINO.",
        "nimble.nets:run",
        ("cpu", "cuda"),
    ),
    "nimble-beside": ("Nets beside busy processes, other pools and other callers.", "nimble.beside:run", ("cpu",)),
    "nimble-dynamic": ("One preparation at many sizes, beside peers with dynamic axes.", "nimble.sizes:run", ("cpu",)),
    "nimble-int8": ("Quantised nets beside ONNX Runtime's and OpenVINO's int8.", "nimble.int8:run", ("cpu",)),
    "nimble-bf16": ("Nets in bf16 beside peers' bf16, with errors.", "nimble.bf16:run", ("cpu",)),
    "nimble-zoo": ("Nets nobody named, of torchvision's and timm's, beside peers.", "nimble.zoo:run", ("cpu",)),
    "nimble-kernels": ("Convolutions and linears by layer, beside oneDNN.", "nimble.kernels:run", ("cpu",)),
    "nimble-training": ("Training steps beside eager and torch.compile.", "nimble.training:run", ("cpu",)),
    "nimble-overhead": ("Cost of a replay beside its kernels.", "nimble.overhead:run", ("cpu",)),
    "nimble-weights": ("Cost of noticing changed weights.", "nimble.weights:run", ("cpu",)),
    "nimble-memory": (
        "Memory that a prepared model keeps and gives back, beside ONNX Runtime's.",
        "nimble.memory:run",
        ("cpu",),
    ),
    "nimble-exactness": ("Distance of results from float64.", "nimble.exactness:run", ("cpu",)),
    "nimble-streams": ("Run time of Algorithm 1 on large graphs.", "nimble.streams:run", ("cpu",)),
    "orca": (
        "Scheduling policies on a real model: all at once, then Poisson arrivals.",
        "orca.policies:run",
        ("*",),
    ),
    "orca-paper": (
        "The ORCA paper's evaluation: iteration-level against request-level scheduling.",
        "orca.paper_suite:run",
        ("cpu",),
    ),
    "orca-replicas": ("Up to 1,000 replicas behind one router, simulated.", "orca.replicas_suite:run", ("cpu",)),
    "orca-peers": (
        "Servers with the same requests and weights: OpenVINO GenAI, llama.cpp, vLLM, transformers.",
        "orca.peers.suite:run",
        ("cpu",),
    ),
    "orca-gguf": ("One GGUF file of 4 or 8 bits behind Orca and its peers, in turn.", "orca.peers.gguf:run", ("cpu",)),
    "orca-contexts": (
        "Prompt and answer at 4k to 32k tokens of context, Orca and llama.cpp, by dtype of keys and values.",
        "orca.peers.contexts:run",
        ("cpu",),
    ),
    "orca-kv-dtypes": ("Predictions and memory by dtype of keys and values.", "orca.kv_dtypes:run", ("cpu",)),
    "orca-scale": ("Throughput and cost of a divided model, by degrees.", "orca.scale:run", ("cpu",)),
    "orca-control": ("Processor time of a divided model's control, without its waits.", "orca.control:run", ("cpu",)),
    "orca-gap": ("Time of the last stage between two iterations.", "orca.scale:run_gap", ("cpu",)),
    "orca-bubbles": ("Idle share of a pipeline: request-level against iteration-level.", "orca.bubbles:run", ("cpu",)),
    "orca-parity": ("Answers of divided models beside one process's, to the bit.", "orca.parity:run", ("cpu",)),
    "orca-overhead": ("Cost of an iteration outside the model.", "orca.overhead:run", ("cpu",)),
    "orca-startup": ("Seconds from a server's start to its first token.", "orca.startup:run", ("cpu",)),
    "orca-weights": ("Memory and predictions of each form of weights.", "orca.weights:run", ("cpu",)),
    "orca-likelihood": (
        "Likelihood of a text by rows in whole numbers, beside llama.cpp, by type of file.",
        "orca.likelihood:run",
        ("cpu",),
    ),
    "orca-native": ("An iteration on native kernels, torch's operators, memory's bound.", "orca.native:run", ("cpu",)),
    "orca-stalls": ("Gaps between tokens of streams while long prompts arrive.", "orca.stalls:run", ("cpu",)),
    "score-cost": ("Cost of showing 64 streams live, in turns with and without.", "orca.score_cost:run", ("cpu",)),
    "orca-gpu": ("Triton kernels and whole iterations against torch's operators.", "orca.gpu:run", ("cuda",)),
    "orca-soak": ("Many clients, half of whom leave midway: each answer checked.", "orca.soak:run", ("cpu",)),
    "windtunnel-infer": (
        "Exact inference against scikit-learn, LightGBM, ONNX Runtime, Hummingbird and treelite.",
        "windtunnel.infer:run",
        ("cpu",),
    ),
    "windtunnel-tables": (
        "The experiments of the dissertation's section 5.4; also mlsys windtunnel bench.",
        "windtunnel.tables:run",
        ("cpu",),
    ),
    "windtunnel-sets": (
        "Records, columns and categories of the experiments' data sets; also mlsys windtunnel bench 5.2.",
        "windtunnel.sets:run",
        ("cpu",),
    ),
    "windtunnel-coverage": (
        "What translates, and how exactly, beside skl2onnx and Hummingbird; also mlsys windtunnel bench coverage.",
        "windtunnel.coverage.suite:run",
        ("cpu",),
    ),
    "windtunnel-drift": (
        "A model kept current by a few hundred labels a week; also mlsys windtunnel bench drift.",
        "windtunnel.drift:run",
        ("cpu",),
    ),
    "windtunnel-public": (
        "Is fine-tuning above a tuned source on eight public sets? Also mlsys windtunnel bench public.",
        "windtunnel.public:run",
        ("cpu",),
    ),
    "windtunnel-distil": (
        "What share of a slow model's gain a small pipeline keeps; also mlsys windtunnel bench distil.",
        "windtunnel.distil:run",
        ("cpu",),
    ),
    "windtunnel-search": ("Sets of fine-tuning options, by validation rows alone.", "windtunnel.search:run", ("cpu",)),
    "windtunnel-training": (
        "Rows a second of a training step, the kernel beside torch.",
        "windtunnel.training:run",
        ("cpu",),
    ),
    "batchmaker": (
        "The BatchMaker paper's figures: cellular against request-level batching.",
        "batchmaker.suite:run",
        ("cpu",),
    ),
    "batchmaker-loops": ("A step of the compiled loops by rows, beside nn.LSTM.", "batchmaker.loops:run", ("cpu",)),
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
    "batchmaker-workers": ("Two workers against one, on real threads.", "batchmaker.workers:run", ("cpu",)),
    "batchmaker-scheduling": ("CPU time of scheduling a cell.", "batchmaker.scheduling:run", ("cpu",)),
    "dvabatch": (
        "DVABatch's Figures 14 to 21: policies against ZeroBatch, DelayBatch and the best static batch.",
        "dvabatch.suite:run",
        ("cpu",),
    ),
    "dvabatch-ideal": ("The largest gain of letting requests join a batch, by costs.", "dvabatch.ideal:run", ("cpu",)),
    "dvabatch-exits": ("Early exits: accuracy against time by rule and threshold.", "dvabatch.exits:run", ("cpu",)),
    "dvabatch-embeddings": (
        "Texts to vectors a second, beside sentence-transformers, fastembed and ONNX Runtime.",
        "dvabatch.embeddings:run",
        ("cpu",),
    ),
    "dvabatch-over-http": ("Running servers over HTTP under Poisson arrivals.", "dvabatch.over_http:run", ("cpu",)),
    "dvabatch-soak": ("Each policy above its capacity: each request checked.", "dvabatch.soak:run", ("cpu",)),
}


@hookimpl
def mlsys_register_benchmarks() -> Iterable[BenchmarkSpec]:
    """Return all suites, by subsystem."""
    return [
        BenchmarkSpec(name=name, help=text, run=f"{__package__}.{run}", devices=devices)
        for name, (text, run, devices) in SUITES.items()
    ]

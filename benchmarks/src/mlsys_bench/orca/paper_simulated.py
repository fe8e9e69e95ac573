"""Section 6.2 on the paper's own cluster, simulated: the serving loop and the schedulers that serve, in virtual time.

Answers have the length asked for; only the GPUs are simulated. An iteration passes pipeline stages that work at the
same time; its cost is a roofline per operator: the larger of arithmetic over the attainable FLOP rate and memory
traffic over the attainable bandwidth, plus what the GPUs of a stage must tell each other. Nothing in it is fitted to
the paper's results.

Sources: ORCA, section 6 and Table 1 (models, 8 A100-40GB per machine, one machine per pipeline stage, fp16); the A100
datasheet (312 TFLOP/s dense fp16, 1,555 GB/s, NVLink 600 GB/s both ways together); 200 Gb/s InfiniBand for each GPU.
The shares of the peaks that kernels attain, and the latency of an all-reduce, are assumptions, typical of large GEMMs,
of streaming kernels and of NCCL within a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import Registry
from mlsys_core.workload import LatencySummary, LoadPoint
from mlsys_orca.scheduling.batch import (
    BatchBuilder,
    GenerationRequest,
    IterationBatch,
    IterationOutput,
    SampledToken,
    SamplingParams,
)
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler

from mlsys_bench.orca.paper import ALONE, Case, Curve
from mlsys_bench.orca.serve import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator. The defaults are an A100-40GB."""

    flops_per_s: float = 312e12  # fp16 with fp32 accumulation, dense
    bytes_per_s: float = 1555e9  # of its memory
    nbytes: float = 40e9
    link_bytes_per_s: float = 300e9  # to its neighbours in the machine, one way
    network_bytes_per_s: float = 25e9  # to another machine
    flops_share: float = 0.5  # of the peak, that GEMMs attain
    bytes_share: float = 0.8  # of the peak, that weights and keys and values are read with
    link_share: float = 0.7
    allreduce_latency_s: float = 20e-6  # besides its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """A GPT of the paper's Table 1."""

    num_layers: int
    hidden_size: int
    vocab_size: int = 50257
    bytes_per_value: int = 2  # fp16

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all layers and the embedding: 12 h^2 in a layer."""
        return 12 * self.num_layers * self.hidden_size**2 + self.vocab_size * self.hidden_size

    @property
    def kv_nbytes_per_token(self) -> int:
        """A key and a value in each layer."""
        return 2 * self.num_layers * self.hidden_size * self.bytes_per_value


GPT_175B = Gpt(num_layers=96, hidden_size=12288)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A model on ``num_stages`` machines (inter-layer) of ``gpus_per_stage`` GPUs each (intra-layer)."""

    model: Gpt = GPT_175B
    gpu: Gpu = Gpu()
    num_stages: int = 2
    gpus_per_stage: int = 8
    usable_share: float = 0.9  # of the GPUs' memory; the rest is for activations and the runtime

    @property
    def num_kv_tokens(self) -> int:
        """The paper's n_slots: what the memory holds beside the parameters."""
        usable = self.usable_share * self.gpu.nbytes * self.num_stages * self.gpus_per_stage
        return int((usable - self.model.num_parameters * self.model.bytes_per_value) / self.model.kv_nbytes_per_token)

    def stages(self) -> list[Callable[[IterationBatch], float]]:
        """Return a cost model for each pipeline stage, the first to the last."""
        costs = [self.stage_s] * (self.num_stages - 1)
        return [*costs, lambda batch: self.stage_s(batch) + self.head_s(batch)]

    def iteration_s(self, batch: IterationBatch) -> float:
        """Return the seconds through all stages, one after the other."""
        return sum(stage(batch) for stage in self.stages())

    def stage_s(self, batch: IterationBatch) -> float:
        """Return the seconds of one stage's layers, and of handing the hidden states on."""
        hidden, num_tokens, width = self.model.hidden_size, batch.num_tokens, self.model.bytes_per_value
        layer_s = self._roofline_s(24 * hidden**2 * num_tokens, 12 * hidden**2 * width)
        # Scores and sums over the context, each a product of two matrices, per request; its keys and values read once.
        pairs = sum(part.num_tokens * part.context_len for part in batch.requests)
        context = sum(part.context_len for part in batch.requests)
        layer_s += self._roofline_s(4 * hidden * pairs, 2 * hidden * context * width)
        layer_s += 2 * self._allreduce_s(num_tokens * hidden * width)
        handed_on_s = num_tokens * hidden * width / self.gpus_per_stage / self.gpu.network_bytes_per_s
        return layer_s * self.model.num_layers / self.num_stages + handed_on_s

    def head_s(self, batch: IterationBatch) -> float:
        """Return the seconds of the logits, in the last stage."""
        size = self.model.vocab_size * self.model.hidden_size
        return self._roofline_s(2 * size * len(batch.sampled), size * self.model.bytes_per_value)

    def _roofline_s(self, flops: float, nbytes: float) -> float:
        gpu = self.gpu
        compute_s = flops / (gpu.flops_per_s * gpu.flops_share)
        return max(compute_s, nbytes / (gpu.bytes_per_s * gpu.bytes_share)) / self.gpus_per_stage

    def _allreduce_s(self, nbytes: float) -> float:
        """Return the seconds of a ring all-reduce: each GPU sends and receives all but its own part twice."""
        if self.gpus_per_stage == 1:
            return 0.0
        sent = 2 * (self.gpus_per_stage - 1) / self.gpus_per_stage * nbytes
        return self.gpu.allreduce_latency_s + sent / (self.gpu.link_bytes_per_s * self.gpu.link_share)


MAX_MODEL_LEN = 2048  # the models' maximum sequence length
CASES = (
    *(Case("orca", size) for size in (1, 8, 32, 128)),
    *(Case("request-level", *sizes) for sizes in ((1, 1), (8, 4), (8, 8), (32, 32))),
)
FIRST_RATE, RATE_FACTOR = 0.05, 1.4  # requests per second, and from one run to the next
_STOP_AT = 4.0  # times the latency of interest: past it a curve goes straight up
_OVERLOADED = 2.0  # offered over done: past it a higher rate changes nothing but the wait


def alone_s(cluster: Cluster) -> float:
    """Return the normalised execution time of a request by itself, in seconds for each output token."""
    num_input, num_output = ALONE
    first_s = cluster.iteration_s(_batch(0, num_input))
    later_s = sum(cluster.iteration_s(_batch(num_input + step, 1)) for step in range(num_output - 1))
    return (first_s + later_s) / num_output


def _batch(num_computed: int, num_tokens: int) -> IterationBatch:
    builder = BatchBuilder()
    builder.add("a", [0] * num_tokens, num_computed_tokens=num_computed, block_table=(0,), sampling=SamplingParams())
    return builder.build()


def simulate_curve(
    case: Case,
    workload: Workload,
    cluster: Cluster,
    *,
    latency_s: float,
    registry: Registry,
) -> Curve:
    """Simulate rising rates, until the median latency is far above the one of interest, or the cluster far behind.

    Args:
        case: The scheduling that serves.
        workload: The requests.
        cluster: The machines that run the iterations.
        latency_s: The median normalised latency of interest, seconds per token.
        registry: Where the policy is looked up.
    """
    points: list[LoadPoint] = []
    for number in itertools.count():
        rate = FIRST_RATE * RATE_FACTOR**number
        point = simulate_point(case, workload, cluster, rate=rate, registry=registry)
        points.append(point)
        assert point.normalized_latency is not None
        if point.normalized_latency.p50 > _STOP_AT * latency_s or rate > _OVERLOADED * point.throughput_rps:
            break
    return Curve(case, tuple(points))


def simulate_point(case: Case, workload: Workload, cluster: Cluster, *, rate: float, registry: Registry) -> LoadPoint:
    """Simulate one run at ``rate`` requests per second, with a scheduler of its own."""
    tables = BlockTables(num_blocks=cluster.num_kv_tokens // BlockTables(num_blocks=1).block_size)
    scheduler = make_scheduler(
        case.policy,
        registry,
        block_tables=tables,
        max_batch_size=case.max_batch_size,
        max_model_len=MAX_MODEL_LEN,
        options=case.options,
    )
    items = workload.trace(rate).items
    requests = (
        GenerationRequest(
            request_id=str(item.index),
            prompt_token_ids=(0,) * item.num_input_tokens,
            max_new_tokens=item.num_output_tokens,
        )
        for item in items
    )
    trace = zip((item.arrival_s for item in items), requests, strict=True)
    served = simulate(scheduler, SimulatedExecutor(cluster.stages(), _sample), trace).requests
    num_output = {str(item.index): item.num_output_tokens for item in items}
    latency = LatencySummary.of(each.latency_s for each in served)
    assert latency is not None
    duration_s = max(each.finished_s for each in served) - items[0].arrival_s
    return LoadPoint(
        offered_rps=rate,
        throughput_rps=len(served) / duration_s,
        latency=latency,
        normalized_latency=LatencySummary.of(each.latency_s / num_output[each.request_id] for each in served),
    )


def _sample(batch: IterationBatch) -> IterationOutput:
    return IterationOutput(tuple(SampledToken(part.request_id, 0) for part in batch.sampled))

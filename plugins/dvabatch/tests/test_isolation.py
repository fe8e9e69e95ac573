"""A client's answer is its own: models that mix requests are refused when they are loaded, others serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.device.cpu import CpuDevice
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Collector, FinishReason, ServeRequest
from mlsys_core.loop.baselines import DelayBatch, StaticBatch, ZeroBatch
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.load import EarlyExitPolicy
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_serving.isolation import draw_like
from torch import Tensor, nn

from .rows import Rows

BATCH = torch.export.Dim("batch", min=1)


class Fn(nn.Module):
    """A function between two layers."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.fn = nn.Linear(6, 6), nn.Linear(6, 6), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.fn(self.first(x)))


def exported(module: nn.Module, *shape: int) -> torch.export.ExportedProgram:
    torch.manual_seed(1)
    with torch.no_grad():
        return torch.export.export(module, (torch.randn(3, *shape),), dynamic_shapes=({0: BATCH},))


MIXING: dict[str, nn.Module] = {
    "softmax over requests": Fn(lambda x: torch.softmax(x, 0)),
    "centred": Fn(lambda x: x - x.mean(0)),
    "a little": Fn(lambda x: x + 1e-6 * x.sum(0)),
    "batch norm in training": nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "running sum": Fn(lambda x: x.cumsum(0)),
    "the largest": Fn(lambda x: torch.minimum(x, x.abs().max() / 2)),
    "attention over requests": Fn(lambda x: torch.softmax(x @ x.T, 1) @ x),
    "the next one": Fn(lambda x: x.roll(1, 0)),
    "only where large": Fn(lambda x: torch.where(x.abs().max() > 100, x - x.mean(0), x)),
    "by the size of the batch": Fn(lambda x: x / x.shape[0]),
    "NaN spills": Fn(lambda x: x + 0 * x.sum(0)),
}
KEEPING: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "softmax within a request": (Fn(lambda x: torch.softmax(x, 1)).eval(), (6,)),
    "batch norm": (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval(), (6,)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval(),
        (3, 12, 12),
    ),
    "a transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (5, 8)),
    "group norm": (nn.GroupNorm(2, 4).eval(), (4, 9)),
    "sorted": (Fn(lambda x: x.sort(1).values).eval(), (6,)),
    "half precision": (nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6)).eval().to(torch.bfloat16), (6,)),
}


@pytest.mark.parametrize("name", sorted(MIXING))
def test_models_that_mix_requests_are_refused(name: str, tmp_path: Path):
    torch.export.save(exported(MIXING[name], 6), tmp_path / "mixing.pt2")
    with pytest.raises(InvalidInputError, match="mixes requests"):
        prepare(str(tmp_path / "mixing.pt2"), tmp_path / "cache")
    if name not in ("by the size of the batch",):
        prepare(
            str(tmp_path / "mixing.pt2"), tmp_path / "cache", Batching(max_batch_size=1, policy="zero", num_stages=1)
        )


def test_a_model_that_guesses_is_refused(tmp_path: Path):
    torch.export.save(exported(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).train(), 6), tmp_path / "guesses.pt2")
    with pytest.raises(InvalidInputError, match="random numbers or remembers"):
        prepare(str(tmp_path / "guesses.pt2"), tmp_path / "cache", Batching(max_batch_size=1))


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_models_that_keep_requests_apart_are_served(name: str):
    module, shape = KEEPING[name]
    dtype = next(module.parameters()).dtype
    program = program_of(module, (torch.randn(1, *shape, dtype=dtype),))
    model = SlicedModel(program, program.allowed_cuts[:2])
    with Engine(model, parse_stages(",".join(["1+1"] * model.num_stages)), Policy()):
        pass


def test_mixing_between_stages_is_found_even_if_the_last_one_undoes_it():
    """A stage is checked by rows: one that sorts its requests breaks as soon as a batch is split behind it."""

    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return torch.zeros_like(x).index_copy(0, order, x.index_select(0, order) * 2)

    program = program_of(Sorts(), (torch.randn(1, 6),))
    SlicedModel(program, []).isolation.require(64)
    position = next(number for number, node in enumerate(program.operators) if "index_copy" in str(node.target))
    with pytest.raises(InvalidInputError, match="mixes requests"):
        SlicedModel(program, [position]).isolation.require(64)


def test_a_model_on_another_device_is_followed_in_host_memory(monkeypatch: pytest.MonkeyPatch):
    """There integers like the example's alone are tried, so a bound and a narrower dtype hide what mixes."""

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (x.to(torch.int16).max() - 1000).clamp(min=0)

    class Elsewhere(CpuDevice):
        torch_name = "cpu:0"

    program = program_of(Counts(), (torch.ones(1, 6, dtype=torch.int64),), device=Elsewhere())
    assert program.module is not program.followed[0]
    monkeypatch.setattr(SlicedModel, "draw", lambda model: draw_like(model.example, is_wide=False))  # as on a GPU
    with pytest.raises(InvalidInputError, match="the operator 'max' computes a value of several"):
        SlicedModel(program, []).isolation.require(64)


def test_a_compiler_that_mixes_requests_is_refused():
    def compile_stage(module: torch.fx.GraphModule, example: tuple[Tensor, ...]) -> Any:
        def run(*args: Tensor) -> Any:
            (output,) = module(*args)
            return (output + 1e-7 * output.sum(0) if len(args[0]) > 3 else output,)

        return run

    program = program_of(Fn(torch.relu), (torch.randn(1, 6),))
    model = SlicedModel(program, [], compile_stage=compile_stage)
    with pytest.raises(InvalidInputError, match="mixes requests"), Engine(model, parse_stages("1+1"), Policy()):
        pass


@pytest.mark.parametrize(
    "policy",
    [ZeroBatch(max_batch_size=64), DelayBatch(max_batch_size=64, delay_s=0.001), StaticBatch(batch_size=8), Policy()],
    ids=["zero", "delay", "static", "stages"],
)
def test_a_poisoned_request_fails_alone_under_every_policy(policy: Any):
    class Picky:
        num_stages = 2

        def collate(self, requests: Any, padded_length: int) -> Any:
            return Rows(np.array([request.payload for request in requests]))

        def run(self, stage: int, values: Any) -> Any:
            if (values.rows < 0).any():
                raise ValueError("a negative value")
            return Rows(values.rows + 1)

        def results(self, values: Any) -> list[Any]:
            return list(np.where(values.rows == 12, np.inf, values.rows))

    collector = Collector[Any, Any]()
    with np.errstate(all="ignore"), Engine(Picky(), parse_stages("1+1,1+1"), policy, listener=collector) as engine:
        for number in range(45):
            value = -1.0 if number in (4, 30) else float(number)
            engine.loop.submit(ServeRequest(str(number), value), str(number))
        assert engine.loop.drain()
    failed = {name for name, f in collector.finished.items() if f.reason is FinishReason.FAILED}
    assert failed == {"4", "30"}
    assert float(collector.finished["10"].result) == np.inf
    others = collector.finished.keys() - failed - {"10"}
    assert all(float(collector.finished[name].result) == int(name) + 2 for name in others)


def test_early_exit_needs_a_model_with_exits(tmp_path: Path):
    torch.export.save(exported(KEEPING["batch norm"][0], 6), tmp_path / "plain.pt2")
    with pytest.raises(InvalidInputError, match=r"has no exits, .* take another policy"):
        prepare(str(tmp_path / "plain.pt2"), tmp_path / "cache", Batching(policy="early-exit"))
    model = SlicedModel(program_of(Fn(torch.relu), (torch.randn(1, 6),)), [])
    with pytest.raises(InvalidInputError, match="has no exits"):
        Engine(model, parse_stages("1+1"), EarlyExitPolicy())

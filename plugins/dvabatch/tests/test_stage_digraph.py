"""The graph of a model's stages."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.costs import TableCosts, unit_name
from mlsys_dvabatch.stages.slicing.exits import ExitingModel
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.zoo import Loaded

from tests.graph_checks import check_graph


def costs(*seconds: float, lengths: tuple[int, ...]) -> TableCosts:
    """Return stages that take so long for one request, and twice as long for four."""
    units = [
        UnitProfile(unit_name(stage, length), (1, 4), (each * length, 2 * each * length), (0.0, 0.0))
        for stage, each in enumerate(seconds)
        for length in lengths
    ]
    return TableCosts(ProfileTable(tuple(units)), len(seconds), lengths)


def test_each_stage_of_a_model_with_heads_has_an_exit(tmp_path: Path):
    import torch
    from torch import nn

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            middle = self.first(x).relu()
            return self.heads[0](middle), self.heads[1](self.second(middle))

    model = ExitingModel(program_of(Heads().eval(), (torch.randn(1, 8),)), 0.9)
    graph = Loaded("heads", model).to_networkx(costs(0.1, 0.1, lengths=(1,)))
    check_graph(graph, tmp_path)
    assert nx.get_node_attributes(graph, "has_exit") == {"stage 1": True, "stage 2": True}
    assert graph.edges["stage 1", "stage 2"]["nbytes"] > 0

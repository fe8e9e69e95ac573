"""Cell graphs and what the scheduler makes of them; plain data and NumPy, no torch."""

from mlsys_batchmaker.plan.graph import CellGraph, Chain, Wire
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import GraphPlan
from mlsys_batchmaker.plan.planner import Planner
from mlsys_batchmaker.plan.spec import CellSpec, Port

__all__ = ["CellGraph", "CellSpec", "Chain", "GraphPlan", "Layout", "Planner", "Port", "Wire"]

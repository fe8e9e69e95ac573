"""Paths of the machine that a program was exported on, which torch writes beside each operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import GraphModule

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def without_places(exported: ExportedProgram) -> ExportedProgram:
    """Return ``exported``, whose operations no longer say in which files and lines they were written."""
    for module in exported.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return exported

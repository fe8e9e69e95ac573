"""The picture of an engine's iterations: a row for each request, a column for each iteration (as ORCA's Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.plot import PALETTE, require_matplotlib
from mlsys_orca.engine.iteration_trace import Iteration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"decode": PALETTE[5], "prefill": PALETTE[1]}
_FINISHED = PALETTE[6]


def iteration_figure(iterations: Sequence[Iteration], *, names: Mapping[str, str] | None = None) -> Figure:
    """Draw which request ran in which iteration, as prefill or as decode, and where it finished.

    Args:
        iterations: In order, at least one, of requests that have all finished: the last cell of each gets the mark.
        names: Request id to the row's label; None: rows are numbered in order of their first iteration.

    Raises:
        InvalidInputError: there is no iteration.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if not iterations:
        raise InvalidInputError("there is no iteration to draw: give the engine a recorder before it serves")
    rows = {request_id: None for iteration in iterations for request_id in iteration.phases}
    labels = [names[each] if names else f"request {number}" for number, each in enumerate(rows, 1)]
    figure = Figure(figsize=(max(7.0, min(14.0, 0.09 * len(iterations))), 0.32 * len(rows) + 1.3), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", xlim=(0.5, len(iterations) + 0.5))
    for row, request_id in enumerate(rows):
        ran = [(number, it.phases[request_id]) for number, it in enumerate(iterations, 1) if request_id in it.phases]
        for phase, color in _COLORS.items():
            cells = [(number - 0.5, 1) for number, own in ran if own == phase]
            axes.broken_barh(cells, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.3)
        axes.plot(ran[-1][0], row, marker="s", markersize=4, color=_FINISHED, linestyle="none")
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    finished = Line2D([], [], marker="s", markersize=4, color=_FINISHED, linestyle="none", label="finished")
    handles = [*(Patch(color=color, label=phase) for phase, color in _COLORS.items()), finished]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure

"""Profiles on disk: how quiet the machine was when they were measured, and what serving has corrected since."""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from mlsys_core.device import Device
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import ProfileCache, ProfileKey, ProfileTable
from mlsys_core.profiling.machine_load import LOADED_SHARE, LoadMeter
from mlsys_dvabatch.scheduling.corrections import Corrections
from mlsys_dvabatch.scheduling.costs import PackedCosts, TableCosts
from mlsys_dvabatch.stages.model import StageModel

_log = logging.getLogger(__name__)
_WIDE_SPREAD = 0.5  # relative spread of repeats, above which the machine was busy
_OTHERS, _SPREAD, _BATCHES = "share of others", "median spread", "batches"  # names of notes


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """Costs of a model and their file."""

    costs: TableCosts
    cache: ProfileCache
    key: ProfileKey
    share_of_others: float | None = None  # share of processor time that others used meanwhile; None: unknown
    spread: float | None = None  # (slowest - fastest) / median of the repeats, the median of all entries
    num_batches: int = 0  # batches that have corrected it
    num_threads: int = 1  # torch's threads during the measurement

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing tells that the machine had other work."""
        return (self.share_of_others or 0) <= LOADED_SHARE and (self.spread or 0) <= _WIDE_SPREAD

    def describe(self) -> str:
        """Return a sentence on how the costs came about."""
        if self.share_of_others is None or self.spread is None:
            text = "Costs measured, with nothing known of other work on the machine"
        else:
            text = f"Costs measured while other processes used {self.share_of_others:.0%} of the machine"
            text += f"; repeats differed by {self.spread:.0%}"
        if self.num_batches:
            return f"{text}; corrected since by {self.num_batches:,} batches."
        return text + ("." if self.is_quiet else "; serving corrects them.")

    def keep(self, corrections: Corrections) -> None:
        """Replace the file's costs by corrected ones, where serving went by any; a folder that cannot be is told."""
        if corrections.published is corrections.measured:
            return
        num_batches = self.num_batches + corrections.num_observed
        notes = _notes(self.share_of_others, self.spread, num_batches)
        try:
            self.cache.put(self.key, corrections.costs().table, notes)
        except InvalidInputError as error:
            _log.warning("corrected costs are lost: %s", error)


def stored_costs(
    cache_dir: Path,
    name: str,
    model: StageModel,
    lengths: Sequence[int],
    measure_costs: Callable[[], TableCosts],
    *,
    device: Device | None = None,
    is_packed: bool = False,
) -> StoredProfile:
    """Return the profile of ``model``, from disk if this machine has measured it with these versions and threads."""
    from mlsys_core.environment import describe_environment

    environment = describe_environment()
    content = f"{name}, {model.num_stages} stages, lengths {list(lengths)}, {_shape_digest(model)}"
    where = f"cpu {environment.get('cpu', '')}: {torch.get_num_threads()} threads"
    if device is not None and device.kind != "cpu":
        where = f"{device.name} beside {where}"
    key = ProfileKey.of(where, {"torch": str(torch.__version__)}, content)
    cache = ProfileCache(cache_dir / "dvabatch-profiles")
    notes = cache.notes(key)

    def measured() -> ProfileTable:
        with LoadMeter() as meter:
            table = measure_costs().table
        spread = statistics.median(each for unit in table.units for each in unit.spread or (0.0,))
        notes.clear()
        notes.update(_notes(meter.load.share_of_others, spread, 0))
        return table

    table = cache.get_or_measure(key, measured, notes=notes)
    costs = (PackedCosts if is_packed else TableCosts)(table, model.num_stages, tuple(lengths))
    return StoredProfile(
        costs,
        cache,
        key,
        share_of_others=notes.get(_OTHERS),
        spread=notes.get(_SPREAD),
        num_batches=int(notes.get(_BATCHES, 0)),
        num_threads=torch.get_num_threads(),
    )


def _notes(share_of_others: float | None, spread: float | None, num_batches: int) -> dict[str, float]:
    found = {_OTHERS: share_of_others, _SPREAD: spread, _BATCHES: num_batches}
    return {name: value for name, value in found.items() if value is not None}


def _shape_digest(model: StageModel) -> str:
    cuts = getattr(model, "cuts", ())
    state = getattr(getattr(model, "program", None), "module", model)
    shapes = (
        [(name, tuple(value.shape)) for name, value in state.state_dict().items()]
        if hasattr(state, "state_dict")
        else []
    )
    return hashlib.sha256(repr((cuts, shapes)).encode()).hexdigest()[:16]

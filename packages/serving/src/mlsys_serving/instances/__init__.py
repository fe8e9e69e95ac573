"""Instances of models in worker processes, behind one front: a worker's death is not its requests' death (ADR 41).

Data flow: :mod:`.remote` (a model as the front sees it) -> :mod:`.fleet` (who runs it; :mod:`.recovery` decides what
runs again) -> frames of :mod:`.members`, tensors in :mod:`.shared` memory -> :mod:`.worker` -> the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_serving.instances.members import InstanceGroup
    from mlsys_serving.instances.remote import RemoteModel
    from mlsys_serving.instances.server import require_processes, serve_instances

__all__ = ["InstanceGroup", "RemoteModel", "require_processes", "serve_instances"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"members": ["InstanceGroup"], "remote": ["RemoteModel"], "server": ["require_processes", "serve_instances"]},
)

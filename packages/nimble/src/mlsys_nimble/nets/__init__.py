"""Nets to schedule: the papers' architectures and some small ones, with random weights that do not change.

:mod:`.registry` has their names, one file a family their modules, :mod:`.resolve` what else a command may be given:
another library's net, a ``.pt2`` file, a function of the user's. Nothing here is downloaded.
"""

from mlsys_nimble.nets.registry import NETS, NetEntry, find_net, net

__all__ = ["NETS", "NetEntry", "find_net", "net"]

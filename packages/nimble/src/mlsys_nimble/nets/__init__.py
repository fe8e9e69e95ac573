"""Nets by name: small ones and known architectures, with random weights that do not change.

:mod:`.registry` has their names, one file a family their modules, :mod:`.resolve` what else a command may be given:
another library's net, a ``.pt2`` file, a function of the user's. Nothing here is downloaded.
"""

from mlsys_nimble.nets.registry import NETS, NetEntry, build, find_net, net

__all__ = ["NETS", "NetEntry", "build", "find_net", "net"]

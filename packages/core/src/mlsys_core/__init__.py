"""Services that the subsystems and plugins of mlsys share.

Importing this package is cheap: it imports no torch and none of its own submodules. Take what you need by name,
for example ``from mlsys_core.memory import plan_offsets``.
"""

__version__ = "0.1.0"

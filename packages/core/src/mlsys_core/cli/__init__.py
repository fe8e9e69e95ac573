"""The ``mlsys`` command: one lazy group over what the plugins register."""

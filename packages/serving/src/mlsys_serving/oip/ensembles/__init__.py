"""Models made of models: directed graphs, whose models batch each for themselves, and cascades, small models first.

Data flow: :mod:`.files` (JSON) -> :mod:`.plan` (pure: what fits together) -> :mod:`.models` (requests to a repository's
models).
"""

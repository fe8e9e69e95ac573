"""Families of operators: each kind's meaning in torch, and its kernel of the CPU. ``backends/table.py`` lists them."""

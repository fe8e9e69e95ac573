"""Scheduling policies of the engine, one module each, chosen by name (docs/orca.md)."""

"""Plugins: specs, hooks, loading and the registry."""

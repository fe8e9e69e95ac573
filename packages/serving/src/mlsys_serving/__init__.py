"""Servers: the HTTP base, supervised processes, the fleet of workers, and what other distributions add to a server."""

__version__ = "0.1.0"

"""Suites of ``mlsys bench`` for WindTunnel: what they measure and with whom; imports nothing heavy."""

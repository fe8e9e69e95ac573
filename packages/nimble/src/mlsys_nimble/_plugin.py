"""Registers this package with mlsys; imports nothing heavy."""

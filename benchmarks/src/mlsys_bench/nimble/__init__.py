"""Nimble against eager, compiled and exported forms of the same nets."""

"""Engines in processes of their own; these modules import the standard library and their engine alone."""

"""Layers of encoders as compiled loops over packed texts."""

"""CatBoost models in WindTunnel: an example of a converter plugin."""

__version__ = "0.1.0"

"""WindTunnel: classical pipelines translated into trainable PyTorch networks."""

from mlsys_windtunnel.graph import FittedSize, Kind, Operator, PipelineGraph, Value
from mlsys_windtunnel.load import load_estimator
from mlsys_windtunnel.parse import parse_pipeline

__version__ = "0.1.0"

__all__ = ["FittedSize", "Kind", "Operator", "PipelineGraph", "Value", "load_estimator", "parse_pipeline"]

"""The Open Inference Protocol v2 as a front of mlsys servers: REST with binary tensors, gRPC, model control."""

__version__ = "0.1.0"

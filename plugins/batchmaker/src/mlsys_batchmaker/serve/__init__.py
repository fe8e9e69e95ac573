"""Models behind core's Open Inference Protocol front."""

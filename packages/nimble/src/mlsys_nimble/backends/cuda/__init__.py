"""The CUDA executor: a plan of streams and events, the few calls that carry it out, graphs that replay it."""

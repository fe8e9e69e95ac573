"""Tensors between the processes of a parallel engine: in shared memory, or over torch.distributed."""

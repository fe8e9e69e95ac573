"""Several hosts: control messages over TCP between processes that share a secret, tensors over torch.distributed."""

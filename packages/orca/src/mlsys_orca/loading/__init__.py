"""Load model files as running models: GGUF files and Hugging Face directories.

Data flows from bytes (:mod:`gguf_file`, :mod:`safetensors_file`) over the format's meaning (:mod:`gguf`,
:mod:`huggingface`) to a :class:`~mlsys_orca.loading.load.LoadedModel`. Importing this package imports no torch.
"""

from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress

__all__ = ["Checkpoint", "Progress"]

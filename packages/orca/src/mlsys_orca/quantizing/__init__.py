"""Models to GGUF files of fewer bits: which type each tensor gets, its codes, and what else the file says."""

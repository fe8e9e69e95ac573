"""Fine-tuning of translated pipelines (section 5.2.4): data to batches, batches to steps, the best epoch kept."""

"""Models cut into stages (DVABatch, section 7.1)."""

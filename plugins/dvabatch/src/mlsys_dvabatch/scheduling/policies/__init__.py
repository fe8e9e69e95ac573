"""Batching policies: each one small class over the three meta-operations (DVABatch, section 7.2)."""

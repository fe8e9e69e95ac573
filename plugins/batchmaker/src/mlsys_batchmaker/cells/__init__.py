"""Cell types, and the check that their rows can be batched."""

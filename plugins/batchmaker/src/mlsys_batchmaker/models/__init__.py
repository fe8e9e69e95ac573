"""Models that really run: sequence encoders, sequence to sequence, trees, and two with trained weights."""

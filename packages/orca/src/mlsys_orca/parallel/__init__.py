"""One model over several processes: stages of layers, ranks of each layer (ADR 22)."""

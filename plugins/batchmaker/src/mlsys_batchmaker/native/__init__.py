"""Recurrent cells as compiled loops over the state pool's rows, for workers on a CPU."""

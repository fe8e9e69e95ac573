"""Recurrent cells as compiled loops over the state pool's rows; :mod:`mlsys_batchmaker.workers.worker` uses them on the CPU."""

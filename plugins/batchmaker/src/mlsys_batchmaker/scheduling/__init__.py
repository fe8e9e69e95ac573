"""The cellular scheduler: manager and Algorithm 1 of the BatchMaker paper; plain data and NumPy, no torch."""

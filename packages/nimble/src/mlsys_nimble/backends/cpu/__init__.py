"""The CPU's kernels and the program that replays them; ``kernel.h`` is the seam between the two."""

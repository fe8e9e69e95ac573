"""The evaluation of the paper (section 8) on this machine."""

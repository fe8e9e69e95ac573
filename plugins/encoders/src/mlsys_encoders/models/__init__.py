"""Models of the paper's evaluation, small definitions of our own."""

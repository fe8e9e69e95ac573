"""Orca against its peers: cases, requests, models of equal weights, and the processes that run them."""

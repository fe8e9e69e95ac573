"""Replicas of one engine in worker processes, and which of them serves a request.

From the top: :mod:`fleet` holds the replicas and hands them workers, :mod:`replica` one replica's requests and its
worker, :mod:`routing` the choice among them by what :mod:`kept_blocks` knows of their prefix caches, :mod:`totals`
sums of their numbers.
"""

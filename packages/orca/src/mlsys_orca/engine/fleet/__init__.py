"""Replicas of one engine in worker processes, and which of them serves a request.

From the top: :mod:`fleet` holds the replicas and hands them workers; :mod:`replica` has one replica's requests and its
worker, :mod:`sealing` what an iteration does to them, :mod:`listeners` who hears of it; :mod:`routing` chooses among
replicas by what :mod:`kept_blocks` knows of their prefix caches; :mod:`totals` sums their numbers.
"""

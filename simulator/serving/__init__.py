"""Served traffic: request streams, schedulers, KV memory and replicas, iteration by iteration.

:mod:`.iteration` says how long one iteration takes; everything else decides which tokens are in it.
"""

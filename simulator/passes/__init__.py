"""Rewrites of a step's graph, each one pure function ``(Graph, Plan) -> Graph`` in a module of its own.

:mod:`.order` says in which order they compose, :mod:`.custom` lets users' own join. Sub-packages hold what passes are
made of: :mod:`.rewriting` serves all, :mod:`.fusion` ``fuse``, :mod:`.sharding` ``tensor``, ``context`` and ``expert``,
:mod:`.zero` ``data``.
"""

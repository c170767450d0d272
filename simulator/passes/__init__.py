"""Rewrites of a step's graph, each one pure function ``(Graph, Plan) -> Graph`` in a module of its own."""

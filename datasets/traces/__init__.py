"""Execution traces: what a node is, reading and writing Chakra's forms, dependencies, groups of ranks, checks.

Others use :func:`.reading.read_trace`, :func:`.protobuf.write`, :class:`.builder.TraceBuilder` and :mod:`.checks`.
"""

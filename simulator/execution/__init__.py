"""Execution traces of a cluster: simulated steps written as traces, traces simulated, what took their time."""

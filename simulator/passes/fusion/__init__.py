"""The rules of :mod:`..fuse`: patterns of nodes, the kernels in their place, what those keep for the backward pass."""

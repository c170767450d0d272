"""The best ways to serve a model on so many GPUs: layouts, batches, chunks, policies, one pool or two.

Others ask through :class:`.request.ServedSearchRequest` and :meth:`...workbench.Workbench.search`.
"""

"""The best layouts of a training step: a space of them, what cannot be best left out, the rest simulated and ranked.

Others ask through :class:`.request.SearchRequest` and :meth:`..workbench.Workbench.search`.
"""

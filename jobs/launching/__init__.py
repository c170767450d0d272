"""Where a campaign runs: here, on Slurm, on Ray, on Kubernetes. All run parts of one plan into one shared store.

``places`` reads the settings (``where=…``); ``slurm``, ``ray_tasks`` and ``kubernetes`` each start the parts one way.
"""

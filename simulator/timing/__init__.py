"""How long things take and when they run: costs of nodes, phases of chunks, tasks of a pipeline."""

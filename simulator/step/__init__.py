"""One step of a model, from its question to its times."""

"""When things run: the order of a pipeline's tasks, and the streams of one device."""

"""What is asked: the plan of a model on a cluster, the framework, the work, and their settings."""

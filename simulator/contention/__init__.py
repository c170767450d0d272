"""What runs on the explicit links of a cluster: the communication of steps, transfers asked alone, faults."""

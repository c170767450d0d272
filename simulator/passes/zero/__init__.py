"""The parts of :mod:`..data`: who holds which weights alike, shards of weights and gradients, and the update."""

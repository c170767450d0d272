"""opcast: how long will it take? For an operator, a training step, an inference step, on hardware you may not have yet."""

__version__ = "0.1.0"

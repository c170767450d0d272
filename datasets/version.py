"""The version of opcast, which measurements and predictors are marked with."""

__version__ = "0.1.0"

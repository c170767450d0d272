"""The version of opcast, which measurements and predictors are marked with."""

__version__ = "0.2.0"

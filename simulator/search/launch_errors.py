"""What cannot be launched."""


class LaunchError(ValueError):
    """A point that a framework cannot be told to run. The message says why and what to change."""

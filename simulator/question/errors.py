"""What a question that cannot be answered raises."""


class PlanError(ValueError):
    """Degrees or options that do not go together. The message names the constraint and the nearest valid choice."""

"""What a question that cannot be answered raises."""


class PlanError(ValueError):
    """Degrees or options that do not go together. The message names the constraint and the nearest valid choice."""


class DegreeError(PlanError):
    """A degree of parallelism that does not divide what it shares out, ``parallel.name=value``; ``why`` says what.

    ``take`` is the nearest value that this check alone would pass (:mod:`..step.advice` asks all of them).
    """

    def __init__(self, why: str, name: str, value: int, take: int, beside: str = "") -> None:
        super().__init__(f"{why}; take parallel.{name}={take}{beside}")
        self.why, self.name, self.value = why, name, value

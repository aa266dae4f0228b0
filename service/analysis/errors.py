class AnalysisError(ValueError):
    """The question cannot be answered from these rows; the message names what is missing."""


class NotComparable(AnalysisError):
    """The runs answer different questions: another task or other data."""


class BadQuestion(AnalysisError):
    """The question itself is wrong; `parameter` is its part, such as `by` or `weight`."""

    def __init__(self, parameter: str, message: str) -> None:
        self.parameter = parameter
        super().__init__(message)

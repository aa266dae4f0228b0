from __future__ import annotations


class BadSubscription(ValueError):
    """A subscription that is not possible; the message says why and what to change.

    Attributes:
        field: the wrong one: `channel`, `target`, `topics`, `project` or `owner`.
    """

    def __init__(self, field: str, why: str) -> None:
        self.field = field
        super().__init__(why)


class Undeliverable(Exception):
    """A receiver did not take a message.

    Attributes:
        again: whether another attempt may help.
        gone: whether the receiver wants no messages any more.
    """

    def __init__(self, why: str, *, again: bool = True, gone: bool = False) -> None:
        self.again = again
        self.gone = gone
        super().__init__(why)

"""What goes wrong on the way to people."""

from __future__ import annotations


class BadSubscription(ValueError):
    """Someone cannot be told in this way; the message says why and what to change.

    Attributes:
        field: what is wrong: `channel`, `target`, `topics`, `project` or `owner`.
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

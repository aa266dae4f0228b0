"""SQL statements that are compiled once in a process, and not once per engine.

A test opens a store of its own, and a process of the fault campaign lives for a second: compiling its
statements is a seventh of what either costs.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine.base import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

_STATEMENTS: LRUCache[Any, Any] = LRUCache(2000)


def share_compiled_statements() -> None:
    """Have all engines of this process, and of those forked from it, keep compiled statements in one place.

    They are found by dialect, which each engine has its own instance of: instances of a class count as equal.
    """
    begin = Engine.__init__

    def began(engine: Engine, *arguments: Any, **options: Any) -> None:
        begin(engine, *arguments, **options)
        engine._compiled_cache = _STATEMENTS

    Engine.__init__ = began  # type: ignore[method-assign]
    DefaultDialect.__eq__ = lambda one, other: type(one) is type(other)  # type: ignore[method-assign,assignment]
    DefaultDialect.__hash__ = lambda one: hash(type(one))  # type: ignore[method-assign,assignment]

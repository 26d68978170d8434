"""What was worked out once, kept for the next call that asks the same."""

from __future__ import annotations

from typing import Any, TypeVar

Value = TypeVar("Value")


class Memory(dict[Any, Any]):
    """A dictionary with an end: full, it is emptied, so that ever new lengths cost no ever new memory. Threads may share it.

    Args:
        room: entries at most.

    Example:
        >>> memory = Memory(room=2)
        >>> [memory.keep(key, key * 10) for key in (1, 2, 3)], dict(memory)
        ([10, 20, 30], {3: 30})
    """

    def __init__(self, room: int = 1024) -> None:
        super().__init__()
        self.room = room

    def keep(self, key: Any, value: Value) -> Value:
        """Keep a value under a key, and return it."""
        if len(self) >= self.room:
            self.clear()
        self[key] = value
        return value

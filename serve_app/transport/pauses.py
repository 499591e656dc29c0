"""Pauses between the tries of an operation."""

import random


class Pauses:
    """Seconds before each next try: `first_s`, doubled up to `longest_s`, less a random part of at
    most a half, because many clients of a process that is lost begin to try at the same time."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def take(self) -> float:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return random.uniform(pause_s / 2, pause_s)

    def reset(self) -> None:
        """After a success: the next pause is the first one again."""
        self._next_s = self._first_s

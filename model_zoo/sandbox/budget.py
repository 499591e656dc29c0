"""What one rendering of a template may take: steps, processor time, and the size of its values."""

import gc
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

# A rendering's own allowance, and what each unit of the conversation adds to it. A unit is a
# character or a value: time and memory grow with what was asked, not with what a template wants.
_BASE_SECONDS, _SECONDS_PER_UNIT = 0.4, 2e-6
# Published templates look back over all earlier messages at each.
_SECONDS_PER_PAIR = 6e-6
_MAX_SECONDS = 10.0
_BASE_UNITS, _UNITS_PER_UNIT = 1 << 18, 16
# All texts and lists ever made, those that are dropped again included.
_MADE_PER_LIMIT = 64
_STEPS_PER_LOOK = 32
_CHARACTERS_PER_STEP = 1 << 12
_MAX_DEPTH = 64
_CONTAINERS: tuple[type, ...] = (
    list,
    tuple,
    set,
    frozenset,
    Mapping,
    type({}.values()),
    type({}.items()),
)


class Budget:
    """Spent by everything that a template does; overspending raises SecurityError.

    Sizes are counted as often as a thing is referred to: a list of a thousand times the same text
    is as large as a thousand texts, since whoever prints or compares it walks all of them.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._sizes: dict[int, tuple[Any, int, int]] = {}  # keeps the object, so its id stays its
        self.limit = 1 << 62
        self._steps_left, self._end = _STEPS_PER_LOOK, float("inf")
        size, _ = self._measure(given, 0)
        self.limit = _BASE_UNITS + _UNITS_PER_UNIT * size
        self._makeable = _MADE_PER_LIMIT * self.limit
        pairs = len(given.get("messages", ())) ** 2
        seconds = _BASE_SECONDS + _SECONDS_PER_UNIT * size + _SECONDS_PER_PAIR * pairs
        self._seconds = min(seconds, _MAX_SECONDS)
        self._end = time.thread_time() + self._seconds

    def step(self, count: int = 1) -> None:
        """`count`: about how many values one operation walks over."""
        self._steps_left -= count
        if self._steps_left <= 0:
            self._steps_left = _STEPS_PER_LOOK
            if time.thread_time() > self._end:
                raise SecurityError(f"it takes longer than {self._seconds:.2f} s")

    @contextmanager
    def not_counting_collections(self) -> Iterator[None]:
        """Within it, full garbage collections of this thread cost no time: they walk over the
        whole process, and it is chance whose rendering sets one off."""
        thread, began = threading.get_ident(), 0.0

        def watch(phase: str, info: Mapping[str, int]) -> None:
            nonlocal began
            if info["generation"] < 2 or threading.get_ident() != thread:
                return
            if phase == "start":
                began = time.thread_time()
            else:
                self._end += time.thread_time() - began

        gc.callbacks.append(watch)
        try:
            yield
        finally:
            gc.callbacks.remove(watch)

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each of them a step."""
        for value in values:
            self.step()
            yield value

    def made(self, value: Any) -> Any:
        """`value`, which the template has just made."""
        size, _ = self._measure(value, 0)
        self.step(1 + size // _CHARACTERS_PER_STEP)
        self._makeable -= size
        if self._makeable < 0:
            raise SecurityError("it makes too much text for this conversation")
        return value

    def size(self, value: Any) -> int:
        return self._measure(value, 0)[0]

    def depth(self, value: Any) -> int:
        return self._measure(value, 0)[1]

    def allow(self, units: int) -> None:
        """Something of this size is about to be made."""
        if units > self.limit:
            raise SecurityError(f"a value of {units:,} characters is too large")

    def _measure(self, value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, str | bytes):
            size, below = len(value) + 1, 0
        elif isinstance(value, _CONTAINERS):
            known = self._sizes.get(id(value))
            if known is not None:
                return known[1], known[2]
            size, below = self._measure_items(value, depth)
            self._sizes[id(value)] = (value, size, below)
        elif isinstance(value, Namespace):
            raise SecurityError("a namespace is no value to write or to put into a list")
        else:
            size, below = 1, 0
        self.allow(size)
        return size, below

    def _measure_items(self, value: Any, depth: int) -> tuple[int, int]:
        if depth > _MAX_DEPTH:
            raise SecurityError("values lie too deep within each other")
        size, below = 1, 0
        pairs = value.items() if isinstance(value, Mapping) else ()
        for item in (part for pair in pairs for part in pair) if pairs else value:
            self.step()
            item_size, item_depth = self._measure(item, depth + 1)
            size += item_size
            below = max(below, item_depth)
            self.allow(size)
        if below >= _MAX_DEPTH:
            raise SecurityError("values lie too deep within each other")
        return size, below + 1

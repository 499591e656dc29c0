"""Copies of weights on devices that the models of one process share."""

from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

from runtime.quant.weight import Weight


class SharedWeights:
    """Holds each copy as long as a model uses it. Models must be loaded in one thread."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[Hashable, Weight] = WeakValueDictionary()

    def get(self, key: Hashable, copy: Callable[[], Weight]) -> Weight:
        """The copy with this key, which identifies file, part and device; `copy` creates it if
        there is none."""
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = copy()
        return found

"""Copies of weights on devices that the models of one process share."""

from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

from runtime.quant.block_types import Weight


class SharedWeights:
    """Each copy exists as long as a model uses it. For models that are loaded in one thread."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[Hashable, Weight] = WeakValueDictionary()

    def get(self, key: Hashable, copy: Callable[[], Weight]) -> Weight:
        """The copy under this key; `copy` makes the first one. The key identifies file, part and
        device."""
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = copy()
        return found

"""Model files that are opened without reading weights, to plan memory and to describe them."""

from collections.abc import Iterator

from model_zoo.gguf.reader import GGUFFile


class HeaderOnlyFile(GGUFFile):
    """A file of which only the header and small tensors that building a model needs are read."""

    def fetch(
        self, name: str, begin: int = 0, nbytes: int | None = None, *, sparse: bool = False
    ) -> Iterator[int]:
        return iter(())

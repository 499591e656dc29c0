"""Model files whose weights stay on disk: what is made of one is an outline."""

from collections.abc import Iterator

from model_zoo.gguf.reader import GGUFFile


class UnreadFile(GGUFFile):
    """Nothing but the header is read, and whatever small is computed with on the way."""

    def fetch(self, name: str, begin: int = 0, nbytes: int | None = None) -> Iterator[int]:
        return iter(())

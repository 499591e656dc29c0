"""Memory-mapped GGUF files: opening reads the header, and weights are views of the map."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from model_zoo.gguf.mapped import MappedBytes, MappedTensors
from model_zoo.gguf.model_headers import FilePart, ModelHeaders, open_parts


class GGUFFile(ModelHeaders, MappedTensors):
    """A validated model file, or all parts of a split one, with its weights.

    The maps live as long as the file or a weight of it. Truncating a mapped file is dangerous (see
    `MappedBytes`). A file that is replaced by rename, as the converter does, stays intact here,
    except on a network file system; the store removes no mapped file.
    """

    def __init__(self, parts: Sequence[FilePart]) -> None:
        ModelHeaders.__init__(self, parts)
        maps = {}
        for part in parts:
            mapped = MappedBytes(part.path, part.map)
            maps.update(dict.fromkeys(part.header.tensors, mapped))
        MappedTensors.__init__(self, self.tensors, maps)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """As `ModelHeaders.open`, with the arrays of the metadata."""
        return cls(open_parts(Path(path), arrays=True))

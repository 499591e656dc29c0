"""LoRA adapters in llama.cpp's GGUF format: pairs of matrices by tensor name."""

from collections.abc import Sequence

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.header_only_file import HeaderOnlyFile
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError, UnsupportedModelError

LISTED_NAMES = 8  # maximum number of names in an error message
_DOWN, _UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"


class Adapter:
    """An open adapter. `names`: the tensors of the model that it changes.

    For a matrix (out, in), `down` is (rank, in) and `up` (out, rank), both with a leading dimension
    of experts if there are any; for the embedding (rows, hidden), they are (rows, rank) and
    (hidden, rank). The change is `scale` * alpha / rank * up @ down, without alpha and rank if the
    file states no alpha.
    """

    def __init__(self, file: GGUFFile, scale: float = 1.0) -> None:
        self.file = file
        metadata = Metadata(file.metadata, path=file.path)
        self.architecture = metadata.architecture
        _check_kind(metadata)
        self._alpha = metadata.get("adapter.lora.alpha", float, 0.0)
        self.scale = scale
        self.names = frozenset(name.rpartition(".lora_")[0] for name in file.tensors)
        self._check_pairs()

    @classmethod
    def open(cls, source: AdapterPath, *, read: bool = True) -> "Adapter":
        """ModelFileError for a damaged file or a file of another kind, UnsupportedModelError for an
        adapter that is not supported. `read`: False leaves the matrices on disk."""
        return cls((GGUFFile if read else HeaderOnlyFile).open(source.path), source.scale)

    def factor(self, name: str) -> float:
        """The factor of the product of the pair of the tensor `name`."""
        rank = self.file.tensors[name + _UP].shape[-1]
        return self.scale * self._alpha / rank if self._alpha else self.scale

    def pair(self, name: str) -> tuple[str, str]:
        """The names of the two matrices, `down` first."""
        return name + _DOWN, name + _UP

    def holds_rows(self, name: str) -> bool:
        """Whether the pair is that of the embedding: `down` has its rows."""
        return name == _EMBEDDING

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the tensor `name` of the model must have."""
        down, up = (self.file.tensors[each].shape for each in self.pair(name))
        if self.holds_rows(name):
            return down[0], up[0]
        return (*down[:-2], up[-2], down[-1])

    def _check_pairs(self) -> None:
        tensors = self.file.tensors
        expected = {each for name in self.names for each in self.pair(name)}
        self._refuse("not the matrices of a LoRA", sorted(tensors.keys() - expected))
        self._refuse("missing", sorted(expected - tensors.keys()))
        uneven = [name for name in sorted(self.names) if not self._is_even(name)]
        self._refuse("of shapes that do not match", [self.pair(name)[0] for name in uneven])
        if not self.names:
            raise ModelFileError(f"{self.file.path}: the adapter has no tensors.")

    def _is_even(self, name: str) -> bool:
        down, up = (self.file.tensors[each].shape for each in self.pair(name))
        if self.holds_rows(name):
            return len(down) == len(up) == 2 and down[1] == up[1] > 0
        same_experts = len(down) == len(up) in (2, 3) and down[:-2] == up[:-2]
        return same_experts and down[-2] == up[-1] > 0

    def _refuse(self, what: str, names: Sequence[str]) -> None:
        if names:
            raise ModelFileError(f"{self.file.path}: {counted(names)} {what} ({listed(names)}).")


def counted(names: Sequence[str]) -> str:
    return f"{len(names):,} {'tensor is' if len(names) == 1 else 'tensors are'}"


def listed(names: Sequence[str]) -> str:
    rest = len(names) - LISTED_NAMES
    return ", ".join(names[:LISTED_NAMES]) + (f" and {rest:,} more" if rest > 0 else "")


def _check_kind(metadata: Metadata) -> None:
    kind = metadata.get("general.type", str, "model")
    if kind != "adapter":
        raise ModelFileError(
            f"{metadata.path}: has `general.type` {kind[:40]!r}; that of a LoRA adapter is adapter."
        )
    type_ = metadata.require("adapter.type", str)
    if type_ != "lora":
        raise UnsupportedModelError(
            f"{metadata.path}: `adapter.type` {type_[:40]!r} is not supported, only lora is."
        )
    if metadata.has("adapter.alora.invocation_tokens"):
        raise UnsupportedModelError(
            f"{metadata.path}: activated adapters (`adapter.alora.invocation_tokens`), which apply "
            "to a part of a prompt, are not supported."
        )

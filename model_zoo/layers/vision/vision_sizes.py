"""The sizes of a vision model, read from the metadata of either kind of file."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from model_zoo.gguf.metadata import MAX_LAYERS, Metadata

MAX_SIDE, MAX_PATCH, MAX_MERGED = 1 << 14, 256, 16
# The side of the squares of patches that become one row, where a file states none.
MERGED = 2
MERGED_KEY = "vision.spatial_merge_size"
CHANNELS = 3
KV_HEADS_KEY = "vision.attention.head_count_kv"
_KEYS = {
    "layers": "vision.block_count",
    "hidden": "vision.embedding_length",
    "heads": "vision.attention.head_count",
    "patch": "vision.patch_size",
}


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """Sizes that nearly all vision models state. Their keys are the same after `clip.` in projector
    files and after the architecture's name in combined files.

    patch: side of a patch in pixels.
    """

    metadata: Metadata
    layers: int
    hidden: int
    heads: int
    patch: int
    eps: float

    @classmethod
    def read(
        cls,
        metadata: Metadata,
        *,
        eps: float,
        eps_key: str = "vision.attention.layer_norm_epsilon",
        others: Mapping[str, str] = MappingProxyType({}),
        **defaults: int,
    ) -> "VisionSizes":
        """eps, defaults (by field): values for files that state none. others: keys of fields that
        have another name.

        Raises ModelFileError for missing or impossible sizes.
        """
        limits = {"layers": MAX_LAYERS, "hidden": 1 << 20, "heads": 1 << 12, "patch": MAX_PATCH}
        keys = {field: others.get(field, key) for field, key in _KEYS.items()}
        found = {
            field: metadata.get_size(keys[field], defaults[field], at_most=limit)
            if field in defaults
            else metadata.require_size(keys[field], at_most=limit)
            for field, limit in limits.items()
        }
        if found["hidden"] % found["heads"]:
            raise metadata.error(
                keys["heads"], f"is {found['heads']}, which does not divide {found['hidden']:,}"
            )
        return cls(metadata, eps=metadata.get_positive(eps_key, eps), **found)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_elements(self) -> int:
        return CHANNELS * self.patch**2

    def side(self, default: int | None = None) -> int:
        """The side of an image or a tile in pixels, at least one patch."""
        key = "vision.image_size"
        side = (
            self.metadata.require_size(key, at_most=MAX_SIDE)
            if default is None
            else self.metadata.get_size(key, default, at_most=MAX_SIDE)
        )
        if side < self.patch:
            raise self.metadata.error(key, f"is {side}, less than a patch of {self.patch} pixels")
        return side

    def kv_heads(self, default: int | None = None) -> int:
        """Number of key and value heads. Raises ModelFileError if query heads cannot share them
        equally, or if the file states none and there is no default."""
        stated = (
            self.metadata.require_size(KV_HEADS_KEY, at_most=self.heads)
            if default is None
            else self.metadata.get_size(KV_HEADS_KEY, default, at_most=self.heads)
        )
        if self.heads % stated:
            raise self.metadata.error(
                KV_HEADS_KEY, f"is {stated}, which does not divide {self.heads} heads"
            )
        return stated

    def quarters(self) -> int:
        """A quarter of a head, for rotation by two coordinates; ModelFileError unless it is
        whole."""
        if self.head_dim % 4:
            raise self.metadata.error(
                "vision.attention.head_count",
                f"leaves heads of {self.head_dim}, which two coordinates cannot turn",
            )
        return self.head_dim // 4


def merged_side(metadata: Metadata, key: str = MERGED_KEY) -> int:
    """The side of the squares of patches that become one row of features."""
    return metadata.get_size(key, MERGED, at_most=MAX_MERGED)

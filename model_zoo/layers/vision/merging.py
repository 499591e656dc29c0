"""Merges neighbouring rows of an image."""

from torch import Tensor

from model_zoo.gguf.metadata import Metadata


def merged_planes(x: Tensor, rows: int, columns: int, size: int) -> Tensor:
    """x [images, rows * columns, hidden] -> [images, merged rows, hidden * size * size].

    Each square of `size` x `size` rows becomes one row, feature by feature as torch's `unfold`
    orders them. Surplus rows and columns at the end are dropped.
    """
    plane = x.unflatten(1, (rows, columns))
    down, right = rows // size, columns // size
    cut = plane[:, : down * size, : right * size].unflatten(2, (right, size))
    parts = cut.unflatten(1, (down, size)).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(len(x), down * right, -1)


def shuffled_planes(x: Tensor, side: int, size: int) -> Tensor:
    """x [images, side * side, hidden] -> [images, merged rows, size * size * hidden].

    Each square of `size` x `size` rows becomes one row: the concatenation of its rows.
    """
    count = side // size
    parts = x.view(len(x), count, size, count, size, -1).transpose(2, 3)
    return parts.reshape(len(x), count * count, -1)


def read_shuffle(metadata: Metadata, across: int, default: int) -> int:
    """The side of the squares of patches that become one row, as stated in llama.cpp's files."""
    size = metadata.get_size("vision.projector.scale_factor", default)
    check_shuffle(metadata, across, size)
    return size


def shuffled_rows(metadata: Metadata, across: int, default: int) -> int:
    """Number of feature rows of a square with `across` patches per side."""
    return (across // read_shuffle(metadata, across, default)) ** 2


def check_shuffle(metadata: Metadata, across: int, size: int) -> None:
    if size < 1 or across % size:
        raise metadata.error(
            "vision.image_size", f"has {across} patches across, which {size} does not divide"
        )

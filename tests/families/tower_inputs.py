"""Random inputs of vision towers: images of one shape, as their processors return them."""

from torch import Tensor

from tests.families.towers import TowerPair, random_pixels
from tests.families.vision_configs import lfm2_processor


def largest(pair: TowerPair, images: int, shape: None = None) -> Tensor:
    """For towers with one image size. Empty tiles of mllama hold noise, which must not matter."""
    return random_pixels(images, *pair.tower.limits.largest.shape)


def tiles(pair: TowerPair, images: int, count: int) -> Tensor:
    """For towers that take any number of tiles."""
    return random_pixels(images, count, *pair.tower.limits.largest.shape[1:])


def qwen_patches(pair: TowerPair, images: int, grid: tuple[int, int]) -> Tensor:
    """Patches in the processor's order."""
    config = pair.twin.config.vision_config
    patches = grid[0] * grid[1] * config.spatial_merge_size**2
    return random_pixels(images, patches, 3 * config.patch_size**2)


def next_tiles(pair: TowerPair, images: int, size: tuple[int, int]) -> Tensor:
    """The whole image of that size and its tiles."""
    return random_pixels(images, *pair.tower.images.outline(*size).shape)


def gemma4_image(pair: TowerPair, images: int, grid: tuple[int, int]) -> Tensor:
    unit = pair.tower.pooled * pair.twin.config.vision_config.patch_size
    return random_pixels(images, 3, grid[0] * unit, grid[1] * unit)


def mistral3_image(pair: TowerPair, images: int, patches: tuple[int, int]) -> Tensor:
    side = pair.twin.config.vision_config.patch_size
    return random_pixels(images, 3, patches[0] * side, patches[1] * side)


def lfm2_parts(pair: TowerPair, images: int, size: tuple[int, int]) -> Tensor:
    config = pair.twin.config
    patch = config.vision_config.patch_size
    rows = lfm2_processor(patch, config.downsample_factor).parts(*size).rows
    return random_pixels(images, rows * config.downsample_factor**2, 3 * patch**2)


QWEN_GRIDS = ((6, 6), (7, 5), (1, 4), (5, 2), (3, 8))  # windows of Qwen2.5-VL are four by four

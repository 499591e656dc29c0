"""Features of images with views of several sizes: those of equal views are computed together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_zoo.images.equal_views import EqualViews


def of_all_views(
    views: Sequence[EqualViews], pixels: Tensor, features: Callable[[Tensor, EqualViews], Tensor]
) -> Tensor:
    """pixels [images, patches, values] -> [images, rows, width]: the rows of each of `views`.

    The patches of a view are in row-major order and consecutive, as are those of equal views.
    features: of such views, pixels [images, views, patches of each, values] -> [images, rows,
    width].
    """
    parts = pixels.split([each.patches for each in views], dim=1)
    made = [
        features(part.unflatten(1, (each.count, -1)), each)
        for each, part in zip(views, parts, strict=True)
    ]
    return made[0] if len(made) == 1 else torch.cat(made, dim=1)

"""Pictures for tests, drawn from a seed: gradients, noise and shapes at any size."""

import functools

import numpy as np
from numpy.typing import NDArray


@functools.cache
def photo(height: int, width: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """[height, width, 3], not to be written to."""
    draw = np.random.default_rng([seed, height, width])
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None, :]
    slopes, shift = draw.uniform(-200, 200, (3, 2)), draw.uniform(60, 190, 3)
    image = np.stack([a * y + b * x for a, b in slopes], axis=-1) + shift
    for _ in range(4):  # sharp edges, where filters differ most
        top, left = draw.uniform(0, 1, 2)
        inside = (abs(y - top) < draw.uniform(0.05, 0.3)) & (abs(x - left) < 0.2)
        image[inside] = draw.choice([0, 255], 3)
    noise = draw.normal(0, 25, (height, width, 3))
    drawn = np.clip(image + noise, 0, 255).astype(np.uint8)
    drawn.setflags(write=False)
    return drawn

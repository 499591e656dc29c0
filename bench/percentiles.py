"""Percentiles, by the definition of all measurements here and of `caravan bench`."""

from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], share: float) -> float:
    """The value that is not exceeded by this share (0 to 1) of at least one value; between two
    values it is interpolated linearly."""
    return float(np.percentile(values, 100 * share))

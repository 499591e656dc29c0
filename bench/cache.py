"""The folder of the models that measurements write and download."""

import os

from runtime.kernels.build import cache_directory

CACHE = cache_directory(os.environ) / "bench"

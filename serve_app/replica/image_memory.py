"""Host memory for the images of one model's requests."""

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.images.decode import BYTES_PER_PIXEL
from model_zoo.multimodal.image_cache import ImageCache
from runtime.engine.memory_plan import available_bytes
from runtime.errors import ConfigurationError
from runtime.vision.encoder import ImageLimits
from serve_app.config.settings import MAX_IMAGE_BYTES, ModelSettings
from serve_app.replica.image_memory_queue import waiting_bytes
from serve_app.replica.prompt_preparation import IMAGE_THREADS

# Defaults, where the memory that is free has these parts of it to spare.
DEFAULT_BYTES, CACHE_SHARE = 2**30, 16
DEFAULT_IMAGES = 4  # images of the largest size
DEFAULT_PIXELS, DECODING_SHARE = 2**26, 4
MIN_DEFAULT_PIXELS = 2**24  # a photograph of a telephone


def create_image_cache(settings: ModelSettings, model: ChatModel) -> ImageCache:
    """ConfigurationError: the largest image does not fit, or the model has no vision."""
    given = settings.image_memory_bytes
    if model.tower is None:
        if given is not None:
            raise ConfigurationError(
                f"`image_memory_bytes` is {given:,}, but the model has no vision. Remove it, or "
                "set `projector`."
            )
        return ImageCache(budget_bytes=DEFAULT_BYTES)
    largest = _largest_bytes(model.tower.limits)
    if given is not None and given < largest:
        raise ConfigurationError(
            f"`image_memory_bytes` is {given:,}; the largest image of this model takes "
            f"{largest:,}, as file and pixels. Raise it."
        )
    return ImageCache(budget_bytes=given or default_cache_bytes(model.tower.limits))


def default_cache_bytes(limits: ImageLimits) -> int:
    """Budget of the image cache: at least one image of the largest size, and more within a share
    of the memory that is free now."""
    largest = _largest_bytes(limits)
    wanted = max(DEFAULT_BYTES, DEFAULT_IMAGES * largest)
    return max(largest, min(wanted, _free_bytes() // CACHE_SHARE))


def default_pixels() -> int:
    """Limit of the pixels of one image, so that the images that are decoded at once take a share
    of the memory that is free now."""
    within = _free_bytes() // DECODING_SHARE // decoding_bytes(1)
    return max(MIN_DEFAULT_PIXELS, min(DEFAULT_PIXELS, within))


def set_aside_bytes(model: ChatModel, image_cache: ImageCache, device: torch.device) -> int:
    """Bytes of the engine's memory that images of requests may take: on a CPU, see `held_bytes`."""
    if model.vision is None or device.type != "cpu":
        return 0
    return held_bytes(image_cache.budget_bytes, model.vision.limits.pixels)


def held_bytes(cache_bytes: int, max_pixels: int) -> int:
    """The image cache, the files that wait for it, and an image of `max_pixels` in each decoding
    thread."""
    return cache_bytes + waiting_bytes(cache_bytes) + decoding_bytes(max_pixels)


def decoding_bytes(max_pixels: int) -> int:
    """What decoding takes while each thread decodes an image of `max_pixels`."""
    return IMAGE_THREADS * BYTES_PER_PIXEL * max_pixels


def _largest_bytes(limits: ImageLimits) -> int:
    return MAX_IMAGE_BYTES + torch.float32.itemsize * limits.pixel_elements


def _free_bytes() -> int:
    return available_bytes(torch.device("cpu"))

"""How much room the host has for the images of one model's requests."""

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.images.decode import BYTES_PER_PIXEL
from model_zoo.multimodal.image_cache import ImageCache
from runtime.errors import ConfigurationError
from runtime.vision.encoder import most_pixels
from serve_app.config.settings import MAX_IMAGE_BYTES, ModelSettings
from serve_app.replica.prompt_preparation import IMAGE_THREADS

LEAST_BY_DEFAULT = 2**30
LARGEST_KEPT = 4  # images, by default


def image_cache_of(settings: ModelSettings, model: ChatModel) -> ImageCache:
    """ConfigurationError where the largest image has no room, or where nothing sees."""
    given = settings.image_memory_bytes
    if model.tower is None:
        if given is not None:
            raise ConfigurationError(
                f"`image_memory_bytes` is {given:,}, but the model sees no images; remove it, or "
                "name its `projector`."
            )
        return ImageCache(budget_bytes=LEAST_BY_DEFAULT)
    largest = MAX_IMAGE_BYTES + torch.float32.itemsize * most_pixels(model.tower)
    if given is not None and given < largest:
        raise ConfigurationError(
            f"`image_memory_bytes` is {given:,}; the largest image that this model takes needs "
            f"{largest:,}, as a file and as pixels."
        )
    return ImageCache(budget_bytes=given or max(LEAST_BY_DEFAULT, LARGEST_KEPT * largest))


def set_aside_bytes(
    settings: ModelSettings, model: ChatModel, image_cache: ImageCache, device: torch.device
) -> int:
    """What images of requests may take of the memory in which the engine lives: on a CPU the
    album, and images as large as they may be in all threads that decode."""
    if model.tower is None or device.type != "cpu":
        return 0
    return image_cache.budget_bytes + IMAGE_THREADS * BYTES_PER_PIXEL * settings.max_image_pixels

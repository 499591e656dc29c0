"""Host memory for the images of one model's requests."""

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.images.decode import BYTES_PER_PIXEL
from model_zoo.multimodal.image_cache import ImageCache
from runtime.errors import ConfigurationError
from runtime.vision.encoder import max_pixel_elements
from serve_app.config.settings import MAX_IMAGE_BYTES, ModelSettings
from serve_app.replica.image_memory_queue import waiting_bytes
from serve_app.replica.prompt_preparation import IMAGE_THREADS

MIN_DEFAULT_BYTES = 2**30
DEFAULT_IMAGES = 4  # images of the largest size


def create_image_cache(settings: ModelSettings, model: ChatModel) -> ImageCache:
    """ConfigurationError: the largest image does not fit, or the model has no vision."""
    given = settings.image_memory_bytes
    if model.tower is None:
        if given is not None:
            raise ConfigurationError(
                f"`image_memory_bytes` is {given:,}, but the model has no vision. Remove it, or "
                "set `projector`."
            )
        return ImageCache(budget_bytes=MIN_DEFAULT_BYTES)
    largest = MAX_IMAGE_BYTES + torch.float32.itemsize * max_pixel_elements(model.tower)
    if given is not None and given < largest:
        raise ConfigurationError(
            f"`image_memory_bytes` is {given:,}; the largest image of this model takes "
            f"{largest:,}, as file and pixels. Raise it."
        )
    return ImageCache(budget_bytes=given or max(MIN_DEFAULT_BYTES, DEFAULT_IMAGES * largest))


def set_aside_bytes(
    settings: ModelSettings, model: ChatModel, image_cache: ImageCache, device: torch.device
) -> int:
    """Bytes of the engine's memory that images of requests may take: on a CPU the image cache, the
    files that wait for it, and an image of maximal size in each decoding thread."""
    if model.tower is None or device.type != "cpu":
        return 0
    held = image_cache.budget_bytes + waiting_bytes(image_cache.budget_bytes)
    return held + IMAGE_THREADS * BYTES_PER_PIXEL * settings.max_image_pixels

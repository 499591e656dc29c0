"""How much room the host has for the images of one model's requests."""

from model_zoo.chat_model import ChatModel
from model_zoo.eyes.album import Album
from runtime.errors import ConfigurationError
from serve_app.settings import MAX_IMAGE_BYTES, ModelSettings

LEAST_BY_DEFAULT = 2**30
LARGEST_KEPT = 4  # images, by default


def album_of(settings: ModelSettings, model: ChatModel) -> Album:
    """ConfigurationError where the largest image has no room, or where nothing sees."""
    given = settings.image_memory_bytes
    if model.tower is None:
        if given is not None:
            raise ConfigurationError(
                f"`image_memory_bytes` is {given:,}, but the model sees no images; remove it, or "
                "name its `projector`."
            )
        return Album(budget_bytes=LEAST_BY_DEFAULT)
    largest = MAX_IMAGE_BYTES + model.tower.largest().pixels.nbytes
    if given is not None and given < largest:
        raise ConfigurationError(
            f"`image_memory_bytes` is {given:,}; the largest image that this model takes needs "
            f"{largest:,}, as a file and as pixels."
        )
    return Album(budget_bytes=given or max(LEAST_BY_DEFAULT, LARGEST_KEPT * largest))

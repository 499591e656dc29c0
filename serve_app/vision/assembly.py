"""From a vision tower to an encoder that is ready: everything fits, or it is refused."""

import torch

from model_zoo.multimodal.vision import VisionModel
from runtime.engine.memory_plan import LEFT_FREE, available_bytes
from runtime.errors import DoesNotFitError
from runtime.worker.runner import is_lack_of_memory
from serve_app.config.settings import VisionSettings
from serve_app.vision.encoder import EncoderReplica

HOST = torch.device("cpu")


def assemble_encoder(
    vision: VisionModel, settings: VisionSettings, *, device: torch.device
) -> EncoderReplica:
    """DoesNotFitError when there is too little memory, on the device or the host."""
    encoder = EncoderReplica(
        vision.tower,
        name=vision.name,
        device=device,
        cache_bytes=settings.cache_bytes,
        batch_images=settings.batch_images,
    )
    _check_memory(encoder, device, settings.memory_bytes)
    try:
        encoder.warm_up()
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        raise DoesNotFitError(
            f"{encoder.batch_images} of the largest images do not fit in the memory left on "
            f"{device}: {error} Lower `vision.batch_images`."
        ) from error
    return encoder


def _check_memory(encoder: EncoderReplica, device: torch.device, given: int | None) -> None:
    """A given limit is used to the last byte; of measured memory a part is left free."""
    computing = encoder.weight_bytes + encoder.device_bytes
    if device.type == "cpu":
        _check(device, computing + encoder.host_bytes, given, encoder)
    else:
        _check(device, computing, given, encoder, there=encoder.weight_bytes)
        _check(HOST, encoder.host_bytes, None, encoder)


def _check(
    device: torch.device,
    needed: int,
    given: int | None,
    encoder: EncoderReplica,
    *,
    there: int = 0,
) -> None:
    """`there`: bytes of what is needed that are no longer free, because they are in place."""
    usable = int((available_bytes(device) + there) * (1 - LEFT_FREE)) if given is None else given
    if needed <= usable:
        return
    raise DoesNotFitError(
        f"The vision encoder needs {needed:,} bytes on {device}, and may use {usable:,}. In all it "
        f"takes {encoder.weight_bytes:,} for weights, {encoder.device_bytes:,} for encoding "
        f"{encoder.batch_images} images at once, {encoder.host_bytes:,} on the host for pixels and "
        "features. Lower `vision.batch_images` or `vision.cache_bytes`, or free memory."
    )

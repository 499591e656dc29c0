"""Builds a ready encoder from a vision tower; fails if memory is insufficient."""

import torch

from model_zoo.multimodal.vision_model import VisionModel
from runtime.engine.memory_plan import LEFT_FREE, available_bytes
from runtime.errors import DoesNotFitError
from runtime.worker.runner import must_fit
from serve_app.config.settings import VisionSettings
from serve_app.vision.encoder_replica import EncoderReplica

HOST = torch.device("cpu")


def assemble_encoder(
    vision: VisionModel, settings: VisionSettings, *, device: torch.device, context_tokens: int
) -> EncoderReplica:
    """`context_tokens`: the longest context of its models.

    DoesNotFitError: memory is insufficient, on the device or the host."""
    encoder = EncoderReplica(
        vision.tower,
        name=vision.name,
        device=device,
        weight_bytes=vision.weight_bytes,
        cache_bytes=settings.cache_bytes,
        batch_images=settings.batch_images,
        first=vision.first_image(device, context_tokens),
    )
    _check_memory(encoder, device, settings.memory_bytes)
    what = f"A batch of {encoder.batch_images} of the largest images"
    with must_fit(what, device, "`vision.batch_images`"):
        encoder.warm_up()
    return encoder


def _check_memory(encoder: EncoderReplica, device: torch.device, limit: int | None) -> None:
    """Check both memories. A given limit may be used completely; of free memory a part is left
    free."""
    computing = encoder.weight_bytes + encoder.device_bytes
    if device.type == "cpu":
        _check(device, computing + encoder.host_bytes, limit, encoder)
    else:
        _check(device, computing, limit, encoder, allocated=encoder.weight_bytes)
        _check(HOST, encoder.host_bytes, None, encoder)


def _check(
    device: torch.device,
    needed: int,
    limit: int | None,
    encoder: EncoderReplica,
    *,
    allocated: int = 0,
) -> None:
    """`allocated`: the part of `needed` that is already allocated."""
    usable = limit
    if usable is None:
        usable = int((available_bytes(device) + allocated) * (1 - LEFT_FREE))
    if needed <= usable:
        return
    raise DoesNotFitError(
        f"The vision encoder needs {needed:,} bytes on {device} and may use {usable:,}. It takes "
        f"{encoder.weight_bytes:,} for weights, {encoder.device_bytes:,} for encoding "
        f"{encoder.batch_images} images at once, {encoder.host_bytes:,} on the host for pixels and "
        "features. Lower `vision.batch_images` or `vision.cache_bytes`, or free memory."
    )

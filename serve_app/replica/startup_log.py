"""What the log says of a model that has been loaded, and of an encoder."""

from model_zoo.chat_model import ChatModel
from runtime.engine.assembly import EngineOptions
from runtime.engine.memory_plan import MemoryPlan
from runtime.vision.encoder import ImageEncoder
from serve_app.config.settings import ModelSettings
from serve_app.logs import get_logger
from serve_app.replica.resolved_model import ModelFiles
from serve_app.vision.encoder import EncoderReplica

log = get_logger()


def log_left_alone(name: str, origin: ModelFiles) -> None:
    for what in origin.left_alone:
        log.info("left alone", model=name, what=what)


def log_reduced_context(name: str, *, asked: int, served: int, reason: str) -> None:
    """The model's own parameters ask for a longer context than it is served with."""
    log.info("context reduced", model=name, num_ctx=asked, context_tokens=served, reason=reason)


def log_model(name: str, model: ChatModel, memory: MemoryPlan) -> None:
    facts = model.description
    log.info(
        "model",
        name=name,
        architecture=facts.architecture,
        quantization=facts.quantization,
        template=facts.template_source or "none: it completes text only",
        parameters=facts.parameter_count,
        weight_bytes=memory.weight_bytes,
        cache_bytes=memory.cache_bytes,
        cache_tokens=memory.cache_tokens,
        activation_bytes=memory.activation_bytes + memory.sampler_bytes,
        vision_bytes=memory.vision_bytes,
        headroom_bytes=memory.headroom_bytes,
    )


def log_vision(
    settings: ModelSettings, encoder: ImageEncoder | None, options: EngineOptions
) -> None:
    """Beside `vision_bytes`, which are for work and features, the tower's weights."""
    if encoder is None:
        return
    rows = encoder.limits.rows
    log.info(
        "vision",
        model=settings.name,
        placement="pool" if settings.vision.pooled else "local",
        weight_bytes=encoder.weight_bytes,
        most_image_rows=rows,
    )
    if rows >= options.context_tokens:
        log.info(
            "largest images do not fit",
            model=settings.name,
            most_image_rows=rows,
            context_tokens=options.context_tokens,
        )


def log_ready(name: str, *, load_s: float, warm_up_s: float) -> None:
    """`load_s`: from the file to a model. `warm_up_s`: memory reserved, a largest step computed."""
    log.info("ready", model=name, load_s=round(load_s, 3), warm_up_s=round(warm_up_s, 3))


def log_encoder(name: str, encoder: EncoderReplica) -> None:
    log.info(
        "vision encoder",
        model=name,
        weight_bytes=encoder.weight_bytes,
        device_bytes=encoder.device_bytes,
        host_bytes=encoder.host_bytes,
        batch_images=encoder.batch_images,
    )

"""Log lines about a loaded model or vision encoder."""

from model_zoo.chat_model import ChatModel
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import MemoryPlan
from runtime.vision.encoder import ImageEncoder
from serve_app.config.settings import ModelSettings
from serve_app.logs import get_logger
from serve_app.replica.model_files import ModelFiles
from serve_app.vision.encoder_replica import EncoderReplica

log = get_logger()


def log_unused(name: str, files: ModelFiles) -> None:
    for what in files.unused:
        log.info("not used", model=name, what=what)


def log_reduced_context(name: str, *, requested: int, served: int, reason: str) -> None:
    """The model's own `num_ctx` is larger than the context that is served."""
    log.info("context reduced", model=name, num_ctx=requested, context_tokens=served, reason=reason)


def log_model(name: str, model: ChatModel, memory: MemoryPlan) -> None:
    facts = model.description
    log.info(
        "model",
        name=name,
        architecture=facts.architecture,
        quantization=facts.quantization,
        template=facts.template_source or "none: text completion only",
        parameters=facts.parameter_count,
        weight_bytes=memory.weight_bytes,
        cache_bytes=memory.cache_bytes,
        cache_tokens=memory.cache_tokens,
        activation_bytes=memory.activation_bytes + memory.sampler_bytes,
        vision_bytes=memory.vision_bytes,
        draft_bytes=memory.draft_bytes,
        headroom_bytes=memory.headroom_bytes,
    )


def log_vision(
    settings: ModelSettings, encoder: ImageEncoder | None, options: EngineOptions
) -> None:
    """`vision_bytes` of `log_model` is workspace and features; this logs the tower's weights."""
    if encoder is None:
        return
    rows = encoder.limits.rows
    log.info(
        "vision",
        model=settings.name,
        placement="pool" if settings.vision.pooled else "local",
        weight_bytes=encoder.weight_bytes,
        max_image_rows=rows,
    )
    if rows >= options.context_tokens:
        log.info(
            "largest images do not fit",
            model=settings.name,
            max_image_rows=rows,
            context_tokens=options.context_tokens,
        )


def log_ready(name: str, *, load_s: float, warm_up_s: float) -> None:
    """`load_s`: reading the weights. `warm_up_s`: reserving memory and one step of maximal size."""
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

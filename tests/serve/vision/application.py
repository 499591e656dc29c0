"""An application with tiny vision models: one with a pool of encoders, and one that is scaled from
zero, as its encoders are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import serve

from serve_app.app import build
from tests.loopback import Exchange, Server, serving
from tests.patience import HANG_S
from tests.serve.application import Application, await_http, replicas_of
from tests.serve.vision.killable_encoders import KillableEncoder
from tests.tiny_vision_model import write_tiny_vision_model
from tests.vision_prompts import png

NAME, PATH = "vision", "/vision"
PICTURE = png(30, 40)
WAIT_S = 280.0  # for an encoder, the most that a model may be given
FROM_ZERO = {"min_replicas": 0, "max_replicas": 1, "metrics_interval_s": 0.25}
STAYING = {**FROM_ZERO, "downscale_to_zero_delay_s": 10 * HANG_S}
SCALING = {**FROM_ZERO, "downscale_delay_s": 1.0}
LIMITS = {"context_tokens": 128, "max_sequences": 8, "num_cpus": 0.1, "threads": 1}
ENCODER = {"num_cpus": 0.1, "threads": 1, "timeout_s": WAIT_S}


@contextmanager
def picture_server() -> Iterator[Server]:
    """Of a picture."""

    def answer(exchange: Exchange) -> None:
        exchange.answer(PICTURE)

    with serving(answer) as server:
        yield server


@contextmanager
def running(application: Application, pictures: Server, folder: Path) -> Iterator[str]:
    """Yields the URL; the model's files are in `folder`."""
    urls = {"allowed_hosts": [pictures.host], "allow_private": True}
    args = {"models": models(folder), "max_images": 8, "image_urls": urls, "responses": None}
    args["start_timeout_s"] = HANG_S
    try:
        with replicas_of(KillableEncoder):
            serve.run(build(args), name=NAME, route_prefix=PATH)
        await_http(f"{application.url}{PATH}")
        yield f"{application.url}{PATH}"
    finally:
        serve.delete(NAME, _blocking=False)


def models(folder: Path) -> list[dict[str, Any]]:
    projector = write_tiny_vision_model(folder / "tiny.gguf", flavour="llama.cpp")
    files = {"source": str(folder / "tiny.gguf"), "projector": str(projector)}
    vision = {**files, "device": "cpu", **LIMITS}
    shared = {"replicas": 2, "batch_images": 4, **ENCODER}
    return [
        # The cache has room for all images of the tests, if they meet on one replica.
        {"name": "shared", **vision, "replicas": 2, "image_cache_bytes": 2**20, "vision": shared},
        {
            "name": "scaled",
            **vision,
            "autoscaling": STAYING,
            "vision": {"autoscaling": SCALING, **ENCODER},
        },
    ]

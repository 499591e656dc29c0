"""A model that is started for a request, and its encoders, which are started for an image and
stopped when there are none."""

from base64 import b64encode

import httpx
from ray import serve

from tests.patience import HANG_S
from tests.serve.application import call_replicas, engine_of, eventually
from tests.serve.vision.application import NAME
from tests.vision_prompts import png

MODEL, ENCODERS = "scaled", "VisionEncoder:scaled"


def replicas(deployment: str) -> int:
    """The number that runs or starts."""
    states = serve.status().applications[NAME].deployments[deployment].replica_states
    return states.get("STARTING", 0) + states.get("RUNNING", 0)


def images_received() -> int:
    """The number of images whose features the model's replica has got."""
    (status,) = call_replicas("status", deployment=MODEL, application=NAME)
    return engine_of(status).images_encoded_total


def answer(url: str, *images: bytes) -> str:
    message = {"role": "user", "content": "hello", "images": [*map(_text, images)]}
    body = {"model": MODEL, "messages": [message], "stream": False}
    body |= {"options": {"temperature": 0, "num_predict": 4}}
    response = httpx.post(f"{url}/api/chat", json=body, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return response.json()["message"]["content"]


def _text(image: bytes) -> str:
    return b64encode(image).decode()


def test_a_model_starts_for_a_request_and_its_encoder_for_an_image_and_stops(url: str) -> None:
    models = httpx.get(f"{url}/api/tags", timeout=HANG_S).json()["models"]
    assert f"{MODEL}:latest" in [model["name"] for model in models]
    assert (replicas(MODEL), replicas(ENCODERS)) == (0, 0), "listing starts none"
    answer(url)
    assert (replicas(MODEL), replicas(ENCODERS)) == (1, 0), "a text needs no encoder"
    answer(url, png(30, 40, seed=1))
    assert images_received() == 1, "the encoder has not computed the features"
    eventually(lambda: replicas(ENCODERS) == 0)
    answer(url, png(30, 40, seed=1))
    assert replicas(ENCODERS) == 0, "cached features need no encoder"

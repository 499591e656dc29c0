"""Encoders that are scaled to zero: started for an image, stopped when there are none."""

from base64 import b64encode

import httpx
from ray import serve

from tests.patience import HANG_S
from tests.serve.application import CALL_TIMEOUT_S, eventually
from tests.serve.vision.application import NAME
from tests.vision_prompts import png

MODEL, ENCODERS = "scaled", "VisionEncoder:scaled"


def encoders() -> int:
    """The number that runs or starts."""
    states = serve.status().applications[NAME].deployments[ENCODERS].replica_states
    return states.get("STARTING", 0) + states.get("RUNNING", 0)


def images_received() -> int:
    """The number of images whose features the model's replica has got."""
    handle = serve.get_deployment_handle(MODEL, NAME).options(method_name="statistics")
    return handle.remote().result(timeout_s=CALL_TIMEOUT_S).images_encoded_total


def answer(url: str, *images: bytes) -> str:
    message = {"role": "user", "content": "hello", "images": [*map(_text, images)]}
    body = {"model": MODEL, "messages": [message], "stream": False}
    body |= {"options": {"temperature": 0, "num_predict": 4}}
    response = httpx.post(f"{url}/api/chat", json=body, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return response.json()["message"]["content"]


def _text(image: bytes) -> str:
    return b64encode(image).decode()


def test_an_encoder_starts_for_an_image_and_stops_afterwards_twice(url: str) -> None:
    assert encoders() == 0
    answer(url)
    assert encoders() == 0, "a text needs no encoder"
    for seed in (1, 2):
        answer(url, png(30, 40, seed=seed))
        assert images_received() == seed, "the encoder has not computed the features"
        eventually(lambda: encoders() == 0)
    answer(url, png(30, 40, seed=1))
    assert encoders() == 0, "cached features need no encoder"

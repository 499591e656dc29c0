"""A model whose source is a registry: its replica pulls it and applies its parameters."""

from pathlib import Path

import httpx
from ray import serve

from serve_app.app import build
from tests.checkout import DEMO_MODEL
from tests.loopback import serving
from tests.patience import HANG_S
from tests.published import Registry
from tests.serve.application import Application, arguments, await_http

# Bytes that no other test has brought into the store, which is one for all.
MODEL = DEMO_MODEL.read_bytes() + bytes(32)
LAYERS = [
    ("model", MODEL),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"temperature": 0, "num_predict": 3}'),
    ("system", b"Be brief."),
]


def test_a_replica_pulls_its_model_and_serves_it(application: Application) -> None:
    published = Registry()
    published.publish("library/demo:latest", LAYERS)
    url = f"{application.url}/pulled"
    with serving(published) as registry:
        source = f"ollama://{registry.host}/library/demo"
        args = arguments(name="other", source=source, context_tokens=None)
        try:
            serve.run(build(args), name="pulled", route_prefix="/pulled")
            await_http(url)
            sent = registry.sent("/blobs/")
            shown = httpx.post(f"{url}/api/show", json={"model": "other"}).json()
            asked = {"model": "other", "messages": [{"role": "user", "content": "hi"}]}
            said = httpx.post(f"{url}/api/chat", json={**asked, "stream": False}, timeout=HANG_S)
        finally:
            serve.delete("pulled")
    assert sent >= len(MODEL)
    assert shown["system"] == "Be brief."
    assert "num_predict" in shown["parameters"]
    assert said.json()["eval_count"] <= 3 and said.json()["done_reason"] == "length"
    assert not list(Path.home().glob(f".caravan/models/manifests/{registry.host}"))

"""A model whose source is a registry: its replica pulls it and applies its parameters."""

from pathlib import Path

import httpx

from tests.loopback import Server, digest
from tests.patience import HANG_S
from tests.serve.many.application import PULLED_BYTES


def test_a_replica_pulls_its_model_and_serves_it(url: str, registry: Server) -> None:
    request = {"model": "pulled", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    reply = httpx.post(f"{url}/api/chat", json=request, timeout=HANG_S)
    description = httpx.post(f"{url}/api/show", json={"model": "pulled"}, timeout=HANG_S).json()
    assert registry.sent(digest(PULLED_BYTES)) >= len(PULLED_BYTES)
    assert description["system"] == "Be brief."
    assert "num_predict" in description["parameters"]
    assert reply.json()["eval_count"] <= 3 and reply.json()["done_reason"] == "length"
    assert not list(Path.home().glob(f".caravan/models/manifests/{registry.host}"))

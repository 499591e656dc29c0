"""A model whose source is a registry: its replica pulls it and applies its parameters."""

from pathlib import Path

import httpx

from tests.loopback import Server, digest
from tests.patience import HANG_S
from tests.serve.many.application import PULLED_BYTES


def test_a_replica_pulls_its_model_and_serves_it(url: str, registry: Server) -> None:
    asked = {"model": "pulled", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    said = httpx.post(f"{url}/api/chat", json=asked, timeout=HANG_S)
    shown = httpx.post(f"{url}/api/show", json={"model": "pulled"}, timeout=HANG_S).json()
    assert registry.sent(digest(PULLED_BYTES)) >= len(PULLED_BYTES)
    assert shown["system"] == "Be brief."
    assert "num_predict" in shown["parameters"]
    assert said.json()["eval_count"] <= 3 and said.json()["done_reason"] == "length"
    assert not list(Path.home().glob(f".caravan/models/manifests/{registry.host}"))

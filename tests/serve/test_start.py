"""The errors of requests for a model that cannot be loaded."""

import httpx
from ray import serve

from serve_app.app import build
from tests.patience import HANG_S
from tests.serve.application import Application, arguments, await_http


def test_the_error_of_a_model_that_does_not_fit_names_the_missing_memory(application: Application):
    url = f"{application.url}/giant"
    request = {"model": "giant", "messages": [{"role": "user", "content": "hi"}]}
    try:
        args = arguments(name="giant", memory_bytes=1_000_000)
        serve.run(build(args), name="giant", route_prefix="/giant")
        await_http(url)
        refused = httpx.post(f"{url}/api/chat", json=request, timeout=HANG_S)
    finally:
        serve.delete("giant", _blocking=False)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    reason = refused.json()["error"]
    assert "giant" in reason and "The model needs" in reason
    assert "1,000,000 bytes available" in reason

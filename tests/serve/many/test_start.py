"""The errors of requests for a model that cannot be loaded."""

import httpx

from tests.patience import HANG_S


def test_the_error_of_a_model_that_does_not_fit_names_the_missing_memory(url: str):
    request = {"model": "giant", "messages": [{"role": "user", "content": "hi"}]}
    refused = httpx.post(f"{url}/api/chat", json=request, timeout=HANG_S)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    reason = refused.json()["error"]
    assert "giant" in reason and "The model needs" in reason
    assert "1,000,000 bytes available" in reason

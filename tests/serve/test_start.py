"""What a replica that cannot start tells the one who starts it."""

import pytest
from ray import serve

from serve_app.app import build
from tests.serve.application import Application, arguments


def test_a_model_that_does_not_fit_says_what_is_missing(application: Application):
    args = arguments(name="giant", memory_bytes=1_000_000)
    try:
        with pytest.raises(RuntimeError) as caught:
            serve.run(build(args), name="giant", route_prefix="/giant")
        status = str(serve.status().applications["giant"])
    finally:
        serve.delete("giant")
    told = str(caught.value) + status
    assert "Model giant: The model needs" in told
    assert "1,000,000 bytes available" in told

"""Settings that depend on the processor."""

import json

import pytest

from runtime.kernels import native
from runtime.quant.block_types import Compute
from serve_app.replica.machine import compute_type


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("auto", Compute.FINE),
        ("exact", Compute.EXACT),
        ("fine", Compute.FINE),
        ("fast", Compute.FAST),
    ],
)
def test_only_a_requested_rounding_that_the_processor_cannot_use_is_logged(
    name: str,
    expected: Compute,
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(native, "has_integer_products", lambda: supported)
    assert compute_type(name) is expected
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    warned = not supported and name in ("fine", "fast")
    assert [line["compute"] for line in lines] == ([name] if warned else [])

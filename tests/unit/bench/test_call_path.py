"""The call path of a text request stays short enough to read."""

import sys

import pytest

from bench import call_path
from bench.call_path import HOPS, text_path
from serve_app.config.settings import ModelSettings
from tests.checkout import DEMO_MODEL

MAX_FUNCTIONS = 45


async def test_a_text_request_passes_few_functions_between_http_and_the_first_kernel():
    settings = ModelSettings(name="demo", source=str(DEMO_MODEL), threads=1, device="cpu")
    path, _ = await text_path(settings)
    assert set(HOPS) <= set(path), "every stage was measured"
    assert path[0].startswith("serve_app.api."), "the outermost middleware"
    assert path[-1].startswith("model_zoo.layers."), "the caller of the first kernel"
    assert len(path) <= MAX_FUNCTIONS, path


def test_the_program_measures_the_demo_model_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def path(settings: ModelSettings) -> tuple[list[str], list[str]]:
        return [str(settings.source)], []

    monkeypatch.setattr(sys, "argv", ["call_path"])
    monkeypatch.setattr(call_path, "text_path", path)
    call_path.main()
    assert capsys.readouterr().out.startswith(f"Call path: 1\n    1 {DEMO_MODEL}\n")

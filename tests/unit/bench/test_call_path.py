"""The call path of a text request stays short enough to read."""

from bench.call_path import HOPS, text_path
from serve_app.config.settings import ModelSettings
from tests.checkout import DEMO_MODEL

HANDLER = "serve_app.api.ollama:OllamaChat.chat"
MAX_FUNCTIONS = 45


async def test_a_text_request_passes_few_functions_between_handler_and_kernel():
    settings = ModelSettings(name="demo", source=str(DEMO_MODEL), threads=1, device="cpu")
    path, _ = await text_path(settings)
    from_handler = path[path.index(HANDLER) :]
    assert set(HOPS) <= set(from_handler), "every stage was measured"
    assert from_handler[-1].startswith("model_zoo.layers."), "the caller of the first kernel"
    assert len(from_handler) <= MAX_FUNCTIONS, from_handler

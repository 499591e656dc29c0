"""The call path of a text request stays short enough to read."""

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

"""The engine behind HTTP computes as the bare engine beside which it is measured."""

from pathlib import Path

from bench.contender import Setting
from bench.rest import _model
from runtime.engine.engine_options import EngineOptions
from serve_app.config.settings import ModelSettings


def test_no_option_of_a_server_alone_changes_what_its_engine_computes() -> None:
    setting = Setting(threads=1, context_tokens=64, sequences=2, step_tokens=32)
    served = ModelSettings.model_validate(_model(Path("x.gguf"), setting))
    bare = EngineOptions(64)
    assert served.speculation.proposed_tokens == bare.proposed_tokens
    assert served.prefix_cache == bare.prefix_cache
    assert served.target_gap_ms == bare.target_gap_ms

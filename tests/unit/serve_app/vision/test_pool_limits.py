"""Replicas and encoders of a pool agree on the largest image."""

import os

from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_encoder, plan_model
from serve_app.replica.model_files import pulled_files
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite

KEYS = {"vision.shortest_edge": 1, "vision.longest_edge": 16 << 20}


def test_an_encoder_accepts_the_images_of_the_longest_context_of_its_models(tmp_path) -> None:
    VISION_MODELS["qwen3vl"].write(tmp_path, flavour="ollama")
    path = rewrite(tmp_path / "tiny.gguf", tmp_path / "large.gguf", own_keys=KEYS)

    def settings(context_tokens: int) -> ModelSettings:
        given = {"name": "tiny", "source": str(path), "device": "cpu", "max_sequences": 2}
        pool = {"placement": "pool", "threads": 1}
        return ModelSettings(**given, context_tokens=context_tokens, vision=pool)

    rows = {}
    for context in (128, 512):
        plan = plan_model(settings(context), pulled_files(settings(context), os.environ))
        rows[context] = plan.model.tower.limits.rows
    assert 96 <= rows[128] < rows[512] and 384 <= rows[512] < 512
    for first, others in ((128, [128, 512]), (512, [128])):
        encoder = load_encoder(settings(first), others)
        assert encoder._tower.limits.rows == rows[512]
        encoder.close()

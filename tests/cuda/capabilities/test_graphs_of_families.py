"""A whole family with CUDA graphs on the device of tests/cuda/test_graphs.py: two minutes."""

from pathlib import Path

import torch

from tests.cuda.computing_device import ComputingCuda
from tests.cuda.fake_device import DEVICE
from tests.cuda.test_graphs import engine_of, fake, requests_of, run, without_spans
from tests.families.text_families import TEXT_MODELS
from tools.gpu_check.models import load_decoder

__all__ = ["fake", "without_spans"]


def test_a_family_gives_the_same_tokens_with_graphs(tmp_path: Path, fake: ComputingCuda) -> None:
    TEXT_MODELS["gemma3"].write(tmp_path / "model.gguf")
    model = load_decoder(tmp_path / "model.gguf", DEVICE, torch.float32)
    requests = requests_of(2, model.vocab_size)
    found = [run(engine_of(model, graphs=graphs), requests) for graphs in (False, True)]
    assert found[0].tokens == found[1].tokens
    assert sum(graph.replays for graph in fake.graphs) > 2

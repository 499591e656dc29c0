"""Tiny models with the kernels of CUDA devices, in Triton's interpreter, against `transformers`."""

from pathlib import Path

import pytest

from runtime.kernels import (
    attention,
    attention_inputs,
    delta,
    pointwise,
    selective_scan,
    state_space,
    token_choice,
    wkv,
)
from tests.families.agreement import check_prompt_and_decoding
from tests.families.text_families import TEXT_MODELS

# Norms of heads before and after the rotation and across heads, caps, windows, chosen tokens and
# blocks, states with and without heads.
FAMILIES = (
    "olmo2",
    "llama4",
    "gemma2",
    "gemma3n",
    "glm-dsa",
    "minimax-m3",
    "qwen3next",
    "lfm2",
    "falcon-h1",
    "mamba",
    "nemotron_h_moe",
    "rwkv7",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = delta, selective_scan, state_space, wkv
    for module in (attention, attention_inputs, pointwise, token_choice, *recurrent):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
        monkeypatch.setattr(module, "library", lambda: None, raising=False)
    row = TEXT_MODELS[family]
    check_prompt_and_decoding(row.pair(tmp_path / "tiny.gguf", next(iter(row.configs))))

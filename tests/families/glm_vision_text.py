"""The text model of GLM-4.1V in the form in which llama.cpp writes it: of architecture glm4, with
sections of rotated dimensions, and with queries and keys whose rotated rows are in halves."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import Glm4vTextConfig, Glm4vTextModel

from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import SIZES
from tests.gguf_files import matrices, rewrite

# Of time, rows and columns: the half of a head of 16 that is rotated, in pairs.
SECTIONS = [1, 1, 2]
_HEAD_DIM, _ROTATED = 16, 8
_PERMUTED = ("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias")


def write_glm4v_text(path: Path) -> Any:
    """Writes the file; returns the model in `transformers`.

    The weights are those of a GLM-4 model, from which the text model differs by the rotation only.
    """
    plain = path.with_name("glm4.gguf")
    twin = TEXT_MODELS["glm4"].write(plain, attention_bias=True, head_dim=_HEAD_DIM)
    twin.model = _text_model(twin)
    tensors = {
        name: _in_halves(rows) for name, rows in matrices(plain).items() if name.endswith(_PERMUTED)
    }
    rewrite(plain, path, own_keys={"rope.dimension_sections": [*SECTIONS, 0]}, tensors=tensors)
    return twin


def _text_model(twin: Any) -> Glm4vTextModel:
    config = Glm4vTextConfig(
        **SIZES,
        vocab_size=twin.config.vocab_size,
        rms_norm_eps=twin.config.rms_norm_eps,
        rope_parameters=dict(twin.config.rope_parameters) | {"mrope_section": SECTIONS},
    )
    config._attn_implementation = "eager"
    model = Glm4vTextModel(config).eval()
    model.load_state_dict(twin.model.state_dict())
    return model


def _in_halves(rows: np.ndarray) -> np.ndarray:
    """`normal_to_neox` of llama.cpp's converter: of each head, first the even rotated rows, then
    the odd ones, then the others."""
    heads = rows.reshape(len(rows) // _HEAD_DIM, _HEAD_DIM, -1)
    even, odd, others = heads[:, :_ROTATED:2], heads[:, 1:_ROTATED:2], heads[:, _ROTATED:]
    return np.concatenate([even, odd, others], axis=1).reshape(rows.shape)

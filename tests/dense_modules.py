"""Matrices after pooling, as sentence-transformers saves them."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

IDENTITY = "torch.nn.modules.linear.Identity"


def write_dense(
    folder: Path, module: str, weight: Tensor, *, activation: str | None = IDENTITY
) -> None:
    """Add the module with the matrix `weight` (out, in) to a saved model."""
    (folder / module).mkdir()
    save_file({"linear.weight": weight}, folder / module / "model.safetensors")
    outs, ins = weight.shape
    settings = {"in_features": ins, "out_features": outs, "bias": False}
    settings |= {} if activation is None else {"activation_function": activation}
    (folder / module / "config.json").write_text(json.dumps(settings))

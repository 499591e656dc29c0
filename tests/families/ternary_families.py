"""The row of BitNet in the table of text families."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import BitNetConfig

from tests.families.text_family import SIZES, TIED, CompleteFile, TextFamily, rope
from tests.tiny_models import save_pretrained


def save_bitnet(model: Any, folder: Path) -> None:
    """Saves the weights as they are during training, and rounds those of the twin."""
    save_pretrained(model, folder)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.copy_(rounded(parameter))


def rounded(weight: Tensor) -> Tensor:
    """As `WeightQuant` of `transformers`, which is always compiled."""
    scale = 1.0 / weight.abs().mean().clamp(min=1e-5)
    return (weight * scale).round().clamp(-1, 1) / scale


FAMILIES: Mapping[str, TextFamily] = {
    "bitnet": TextFamily(
        BitNetConfig,
        SIZES | TIED | rope(5e5),
        {"plain": {}, "silu": {"hidden_act": "silu"}},
        wide=None,
        divided=None,
        options={"save": save_bitnet},
        effective_keys={"hidden_activation": "silu"},
        refused=[({"hidden_activation": "gelu"}, "supported are silu and relu2")],
        files=(
            CompleteFile(
                optional_keys="attention.key_length attention.value_length hidden_activation"
            ),
        ),
    ),
}

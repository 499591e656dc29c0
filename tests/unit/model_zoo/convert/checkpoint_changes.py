"""Changes of checkpoints saved by `transformers`, for tests."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TINY_LLAMA = LlamaConfig(**SIZES)
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def copy(folder: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def settings(folder: Path, **changes: object) -> None:
    """Changes the folder's config.json; None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def reshaped(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Saves the weights after `change`."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def sharded(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {SHARD: names[::2], SHARD.replace("1-of", "2-of"): names[1::2]}
    for file, own in shards.items():
        save_file({name: weights[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()

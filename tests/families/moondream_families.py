"""Tiny models of Moondream for the tables of towers and of vision models: SigLIP, a projector with
wide rows between its matrices and Phi, in files like those of the authors' converter."""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn
from transformers import PhiConfig, PreTrainedConfig, SiglipVisionConfig, SiglipVisionModel

from model_zoo.chat_model import Prompt
from model_zoo.convert.convert_folder import convert
from model_zoo.models.llava.placeholders import MOONDREAM_TEXTS, PLACE
from model_zoo.models.llava.vision import SIGLIP_LAYERS, LlavaTower
from model_zoo.registry import load
from tests.families.minicpmv_twin import LAYER, randomise
from tests.families.text_family import SIZES, rope
from tests.families.tower_family import TowerFamily
from tests.families.towers import TowerPair, load_tower, random_pixels
from tests.families.vision_agreement import CPU, VisionPair, write_checkpoint
from tests.gguf_files import finish

SIDE, PATCH, HIDDEN, INNER, WIDTH = 36, 6, 48, 128, 64


class MoondreamTwin(nn.Module):
    """text: the twin of the text model."""

    def __init__(self, *, layers: int = SIGLIP_LAYERS, seed: int = 0) -> None:
        super().__init__()
        self.config = SiglipVisionConfig(
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_hidden_layers=layers,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
            layer_norm_eps=1e-2,
            vision_use_head=False,
        )
        self.vision = SiglipVisionModel(self.config)
        self.first, self.second = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, WIDTH)
        self.text: Any = None
        self.eval().requires_grad_(False)
        randomise(self, seed)

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [images, 3, side, side] -> [images, rows, width]."""
        rows = self.vision(pixels).last_hidden_state
        return self.second(nn.functional.gelu(self.first(rows), approximate="tanh"))


def write_tower(folder: Path, **settings: Any) -> TowerPair:
    path, twin = folder / "mmproj-tiny.gguf", MoondreamTwin(**settings)
    write_projector(path, twin)
    return TowerPair(load_tower(LlavaTower, path), twin, path)


def pixels(pair: TowerPair, images: int, shape: None) -> Tensor:
    return random_pixels(images, 3, SIDE, SIDE)


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, shape: None) -> Tensor:
    return pair.twin.features(pixels)


TOWER = TowerFamily(
    LlavaTower,
    PreTrainedConfig,
    {"plain": {}},
    pixels,
    tower_features,
    flavours=("llama.cpp",),
    writer=write_tower,
)


def write_model(folder: Path, files: tuple[str, str], **settings: Any) -> VisionPair:
    source, twin = folder / "checkpoint", MoondreamTwin(**settings)
    text = SIZES | {"num_key_value_heads": 4} | rope(10000.0, partial_rotary_factor=0.5)
    spelled = MOONDREAM_TEXTS.spelled
    twin.text = write_checkpoint(PhiConfig(**text), source, special=(PLACE,), spelled=spelled)
    path, projector = (folder / name for name in files)
    convert(source, path, type="f32", flavour="llama.cpp")
    write_projector(projector, twin)
    model = load(path, projector=projector, device=CPU, dtype=torch.float32)
    return VisionPair(model, twin, expected)


@torch.inference_mode()
def expected(twin: MoondreamTwin, prompt: Prompt) -> Tensor:
    """Logits of the text model for a prompt with the features of its images."""
    x = twin.text.get_input_embeddings()(torch.tensor(prompt.tokens))
    shown = {image.digest: twin.features(image.pixels[None])[0] for image in prompt.images}
    for span in prompt.spans:
        x[span.start : span.end] = shown[span.digest]
    return twin.text(inputs_embeds=x[None]).logits[0]


def write_projector(path: Path, twin: MoondreamTwin) -> None:
    """The last layer twice, and the names of the feed-forward's matrices exchanged."""
    config, writer = twin.config, gguf.GGUFWriter(path, "clip")
    for key, flag in {
        "has_text_encoder": False,
        "has_vision_encoder": True,
        "has_llava_projector": True,
        "use_gelu": True,
    }.items():
        writer.add_bool(f"clip.{key}", flag)
    writer.add_string("clip.projector_type", "mlp")
    for key, value in {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": HIDDEN,
        "feed_forward_length": config.intermediate_size,
        "projection_dim": WIDTH,
        "attention.head_count": config.num_attention_heads,
        "block_count": config.num_hidden_layers + 1,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", config.layer_norm_eps)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    for name, tensor in _named(twin).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    finish(writer)


def _named(twin: MoondreamTwin) -> dict[str, Tensor]:
    embeddings, layers = twin.vision.embeddings, list(twin.vision.encoder.layers)
    modules: dict[str, nn.Module] = {
        "mm.0": twin.first,
        "mm.2": twin.second,
        "v.patch_embd": embeddings.patch_embedding,
        "v.post_ln": twin.vision.post_layernorm,
    }
    for index, layer in enumerate([*layers, layers[-1]]):
        modules |= {f"v.blk.{index}.{own}": layer.get_submodule(n) for n, own in LAYER.items()}
    named = {"v.position_embd.weight": embeddings.position_embedding.weight[None]}
    for name, module in modules.items():
        named |= {f"{name}.{kind}": tensor for kind, tensor in module.named_parameters()}
    return named

"""LLaVA's eyes: CLIP without its last layer, and two layers of a projector."""

from functools import partial

import torch
from torch import Tensor

from model_zoo.conversion import checks, towers
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.encoder import (
    EncoderLayer,
    layer_norms,
    read_feed_forward,
    read_layer,
)
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.sizes import CHANNELS, VisionSizes
from model_zoo.layers.vision.vit import Vit, VitNames
from runtime.errors import UnsupportedModelError
from runtime.kernels.pointwise import gelu, gelu_erf, gelu_quick
from runtime.vision import ImageLimits, PreparedImage

EPS = 1e-5
# How an image becomes a square: amid more of the mean colour, or by its middle alone.
ASPECT_KEY = "vision.image_aspect_ratio"
PADDED, MIDDLE = "pad", "square"


class LlavaTower:
    """See runtime.vision.VisionTower. pixels [images, 3, side, side]; the grid is of no use.

    Files have the layers up to the one whose output is projected, so all are computed.
    """

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        before = w.loaded_bytes
        _refuse_what_is_not_served(w, metadata)
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._side = sizes.side()
        self._vit = Vit(
            w.scope("v"),
            sizes,
            self._side,
            partial(_layer, sizes=sizes),
            names=VitNames(pre_norm=("pre_ln",)),
            classed=True,
            post_optional=True,
        )
        width = (w.shape("mm.2") or (1,))[0]
        self._first = w.linear("mm.0", shape=(width, sizes.hidden))
        self._second = w.linear("mm.2", shape=(width, width))
        self.limits = ImageLimits(self._vit.across**2, width, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        projected = images * self.limits.rows * (2 * self._sizes.hidden + 5 * self.limits.width)
        return 4 * projected + self._vit.nbytes(images)

    def largest(self) -> PreparedImage:
        pixels = torch.zeros(CHANNELS, self._side, self._side)
        return PreparedImage(pixels, (1, 1), bytes(16), self.limits.rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        rows = self._vit(pixels).flatten(0, 1)
        return self._second(gelu_erf(self._first(rows))).view(len(pixels), -1, self.limits.width)


def build_tower(w: TensorScope, metadata: Metadata) -> LlavaTower:
    """From a file of its own."""
    return LlavaTower(w, metadata)


def _layer(w: TensorScope, *, sizes: VisionSizes) -> EncoderLayer:
    """CLIP's curve is the coarsest approximation; other encoders say that theirs is finer."""
    curve = gelu if sizes.metadata.get("use_gelu", bool, False) else gelu_quick
    feed_forward = read_feed_forward(w, sizes, LayerNames(), curve)
    return read_layer(w, sizes, LayerNames(), layer_norms(w, sizes), feed_forward)


def _refuse_what_is_not_served(w: TensorScope, metadata: Metadata) -> None:
    """LLaVA-NeXT's tiles, features of several layers, and projectors with norms."""
    reason = None
    if metadata.has("vision.image_grid_pinpoints") or w.has("mm.3"):
        reason = "is a projector of another LLaVA than 1.5, with tiles or norms"
    layers = metadata.get_array("vision.feature_layer", int)
    if layers is not None and list(layers) != [metadata.require_size("vision.block_count")]:
        reason = f"takes features from the layers {list(layers)}, not from the last that it has"
    if reason is not None:
        raise UnsupportedModelError(f"{metadata.path}: {reason}, which is not served.")


def _feature_layer(config: Configuration) -> int:
    """How many layers are computed: negative numbers count from behind the last."""
    stated = config.model.get("vision_feature_layer", -2)
    if not isinstance(stated, int):
        raise config.error(f"takes features from the layers {stated}; only one is known")
    return stated if stated >= 0 else config.layers + stated + 1


def _aspect(config: Configuration) -> str:
    """As the checkpoint's processor does it, of which several classes have the same settings."""
    stated = towers.preprocessing(config)
    if stated.get("do_pad"):
        return PADDED
    if not stated.get("do_center_crop", True):
        raise config.error("has a processor that neither pads images nor cuts them to a square")
    return MIDDLE


def _is_computed(config: Configuration, layer: int) -> bool:
    return layer < _feature_layer(config)


_MODULES = (
    ("layer_norm1", "ln1"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_out"),
    ("layer_norm2", "ln2"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
)
VISION = Conversion(
    serves=("LlavaForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *(key for key in towers.SIZES if key.name != "vision.block_count"),
        Key("vision.block_count", _feature_layer),
        towers.IMAGE_SIZE,
        *towers.clip("mlp", towers.CLIP, eps="layer_norm_eps"),
        Key("has_llava_projector", lambda c: True),
        Key(ASPECT_KEY, _aspect),
    ),
    rules=(
        Rule("embeddings.class_embedding", "v.class_embd", keep=True),
        Rule("embeddings.patch_embedding.weight", "v.patch_embd.weight"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
        Rule("pre_layrnorm.*", "v.pre_ln.*"),
        *(
            Rule(f"encoder.layers.{{n}}.{module}.*", f"v.blk.{{n}}.{name}.*", only=_is_computed)
            for module, name in _MODULES
        ),
        Rule("multi_modal_projector.linear_1.*", "mm.0.*"),
        Rule("multi_modal_projector.linear_2.*", "mm.2.*"),
    ),
    roots=towers.roots("vision_tower.vision_model", "vision_tower"),
    drop=(
        *towers.TEXT,
        "encoder.layers.{n}.**",  # behind the last that is computed
        "post_layernorm.*",
        "embeddings.position_ids",
    ),
    defaults={"layer_norm_eps": EPS, "hidden_act": "quick_gelu"},
    check=checks.all_of(
        towers.known_setting("model_type", "clip_vision_model"),
        towers.known_setting("hidden_act", "quick_gelu"),
        towers.known_setting("num_channels", 3),
        towers.same_side("crop_size"),
        towers.same_side("size"),
        towers.known_of_model("projector_hidden_act", "gelu"),
        towers.known_of_model("vision_feature_select_strategy", "default"),
    ),
)

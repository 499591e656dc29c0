"""InternVL's eyes: a vision transformer with scaled layers on tiles, rows shuffled into fewer."""

from functools import partial

from torch import Tensor

from model_zoo.conversion import checks, towers
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds, blank
from model_zoo.layers.vision.encoder import (
    EncoderLayer,
    layer_norms,
    read_feed_forward,
    read_layer,
    rms_norms,
)
from model_zoo.layers.vision.merging import read_shuffle, shuffled_planes
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.sizes import VisionSizes
from model_zoo.layers.vision.vit import Vit
from runtime.kernels.pointwise import gelu_erf
from runtime.vision import ImageLimits, PreparedImage

EPS, PROJECTOR_EPS = 1e-6, 1e-5
SHUFFLED = 2
# Tiles of an image, where nothing else is said, and the whole image as one more.
MOST_TILES = 12
LEAST_TILES_KEY, MOST_TILES_KEY = "vision.preproc_min_tiles", "vision.preproc_max_tiles"


class ScaledTower:
    """See runtime.vision.VisionTower. pixels [images, tiles, 3, side, side]; the grid is of no use.

    Rows of features are those of the tiles, one after the other.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        before = w.loaded_bytes
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._vit = Vit(
            w.scope("v"),
            sizes,
            sizes.side(),
            partial(_layer, sizes=sizes),
            classed=True,
            post_optional=True,
        )
        self._shuffled = read_shuffle(metadata, self._vit.across, SHUFFLED)
        self._wide = wide = sizes.hidden * self._shuffled**2
        mm = w.scope("mm", "model", "mlp")
        self._norm = mm.layer_norm("0", PROJECTOR_EPS, size=wide)
        width = (mm.shape("3") or (1,))[0]
        self._first = mm.linear("1", shape=(width, wide))
        self._second = mm.linear("3", shape=(width, width))
        self._largest = images.largest
        self._tiles = -(-images.most_rows // (self._vit.across // self._shuffled) ** 2)
        self.limits = ImageLimits(images.most_rows, width, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        projected = images * self.limits.rows * (5 * self._wide + 5 * self.limits.width)
        return 4 * projected + self._vit.nbytes(images * self._tiles)

    def largest(self) -> PreparedImage:
        return blank(self._largest)

    def encode(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        rows = self._vit(pixels.flatten(0, 1)).contiguous()
        shuffled = shuffled_planes(rows, self._vit.across, self._shuffled).flatten(0, 1)
        features = self._second(gelu_erf(self._first(self._norm(shuffled))))
        return features.view(len(pixels), -1, self.limits.width)


def build_tower(w: TensorScope, metadata: Metadata, *, images: ImageBounds) -> ScaledTower:
    """From a file of its own, for such images."""
    return ScaledTower(w, metadata, images)


def _layer(w: TensorScope, *, sizes: VisionSizes) -> EncoderLayer:
    """What is added is scaled, each element by its own; the largest towers have norms of roots."""
    feed_forward = read_feed_forward(w, sizes, LayerNames(), gelu_erf)
    bias = w.table("ln1.bias", shape=(sizes.hidden,), optional=True)
    norms = rms_norms(w, sizes) if bias is None else layer_norms(w, sizes)
    return read_layer(
        w,
        sizes,
        LayerNames(),
        norms,
        feed_forward,
        attn_gate=w.vector("ls1", size=sizes.hidden, optional=True),
        ffn_gate=w.vector("ls2", size=sizes.hidden, optional=True),
    )


def _side(name: str) -> Key:
    return Key(f"vision.{name}", lambda c: _of_square(c, name))


def _of_square(config: Configuration, name: str) -> int:
    stated = config.require(name)
    height, width = stated if isinstance(stated, list) else (stated, stated)
    if height != width:
        raise config.error(f"has {stated} as `{name}`, no square")
    return int(height)


def _shuffle(config: Configuration) -> int:
    return round(1 / float(config.model.get("downsample_ratio", 1 / SHUFFLED)))


def _places(config: Configuration, table: Tensor) -> Tensor:
    return table.flatten(0, -2)


def _class(config: Configuration, token: Tensor) -> Tensor:
    return token.flatten()


_MODULES = (
    ("layernorm_before", "ln1"),
    ("attention.q_proj", "attn_q"),
    ("attention.k_proj", "attn_k"),
    ("attention.v_proj", "attn_v"),
    ("attention.projection_layer", "attn_out"),
    ("layernorm_after", "ln2"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
)
VISION = Conversion(
    serves=("InternVLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *(key for key in towers.SIZES if key.name != "vision.patch_size"),
        _side("patch_size"),
        _side("image_size"),
        *towers.clip("internvl", towers.IMAGENET, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True),
        Key("vision.projector.scale_factor", _shuffle),
        Key(LEAST_TILES_KEY, lambda c: towers.preprocessing(c).get("min_patches", 1)),
        Key(MOST_TILES_KEY, lambda c: towers.preprocessing(c).get("max_patches", MOST_TILES)),
    ),
    rules=(
        Rule("embeddings.patch_embeddings.projection.*", "v.patch_embd.*"),
        Rule("embeddings.cls_token", "v.class_embd", _class, keep=True),
        Rule("embeddings.position_embeddings", "v.position_embd.weight", _places),
        *(
            Rule(f"encoder.layer.{{n}}.{module}.*", f"v.blk.{{n}}.{name}.*")
            for module, name in _MODULES
        ),
        *(
            Rule(
                f"encoder.layer.{{n}}.attention.{part}_norm.weight",
                f"v.blk.{{n}}.attn_{part}_norm.weight",
                optional=True,
            )
            for part in "qk"
        ),
        *(
            Rule(f"encoder.layer.{{n}}.lambda_{part}", f"v.blk.{{n}}.ls{part}.weight")
            for part in (1, 2)
        ),
        Rule("layernorm.*", "v.post_ln.*", optional=True),
        Rule("multi_modal_projector.layer_norm.*", "mm.model.mlp.0.*"),
        Rule("multi_modal_projector.linear_1.*", "mm.model.mlp.1.*"),
        Rule("multi_modal_projector.linear_2.*", "mm.model.mlp.3.*"),
    ),
    roots=towers.roots("vision_tower"),
    drop=towers.TEXT,
    defaults={"patch_size": 14, "image_size": 448, "layer_norm_eps": EPS},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("num_channels", 3),
        towers.known_setting("use_absolute_position_embeddings", True),
        towers.same_side("size"),
        towers.known_of_model("projector_hidden_act", "gelu"),
        towers.known_of_model("vision_feature_layer", -1),
        towers.known_of_model("vision_feature_select_strategy", "default"),
    ),
)

"""Qwen3-VL's eyes: pictures of any shape, and features for the first text layers as well."""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.conversion import checks, towers
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds, blank
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.attention import View, repeated, whole
from model_zoo.layers.vision.encoder import (
    EncoderLayer,
    encoder_bytes,
    layer_norms,
    read_feed_forward,
    read_layer,
)
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.patches import frame_embedding, stacked_frame_embedding
from model_zoo.layers.vision.rotary import coordinates, halves_rotary
from model_zoo.layers.vision.sizes import MAX_MERGED, VisionSizes
from runtime.kernels.pointwise import gelu, gelu_erf
from runtime.vision import ImageLimits, PreparedImage

EPS, MERGED, FRAMES, PLACES = 1e-6, 2, 2, 2304
DEEP_LAYERS = (8, 16, 24)
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")
LAYER = LayerNames(
    attn_norm=("ln1", "norm1"),
    ffn_norm=("ln2", "norm2"),
    up=("ffn_up", "mlp.linear_fc1"),
    down=("ffn_down", "mlp.linear_fc2"),
)


class DeepTower:
    """See runtime.vision.VisionTower. pixels [images, patches, channels * frames * side * side].

    Patches that are merged follow each other, and these squares follow each other line by line, in
    a rectangle as `grid` says. A row of features is that of the last layer and then those of
    `deep` layers before, for as many layers of the text model.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        before = w.loaded_bytes
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype = w.device, w.dtype
        self._merge = metadata.get_size("vision.spatial_merge_size", MERGED, at_most=MAX_MERGED)
        v = w.scope("v")
        if v.has("patch_embed"):
            self._embed = stacked_frame_embedding(v, sizes, "patch_embed", frames=FRAMES)
        else:
            self._embed = frame_embedding(v, sizes, *FILE_FRAMES)
        self._places = _places(v, sizes)
        self._rotary = halves_rotary(w, sizes)
        self._layers = [_layer(v.scope("blk", i), sizes) for i in range(sizes.layers)]
        each = self._merge**2
        self._merger = _last_merger(w, sizes, each)
        self._deep = _deep_mergers(v, sizes, each)
        self._largest = images.largest
        self.depth = 1 + len(self._deep)
        self.limits = ImageLimits(images.most_rows, self._merger.width * self.depth, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (2 * FRAMES * sizes.patch_elements + 5 * sizes.hidden)
        results = merged * (self._merger.row_elements + 2 * self.limits.width)
        return 4 * (edges + results) + encoder_bytes(self._device, sizes, self._layers, rows)

    def largest(self) -> PreparedImage:
        return blank(self._largest)

    def encode(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self._merge for side in grid)
        x = self._embed(pixels.to(self._dtype).flatten(0, 1))
        down, across = coordinates(rows, columns, block=self._merge, device=x.device)
        places = self._stretched(rows, columns)[down * columns + across]
        x.view(images, rows * columns, -1).add_(places.to(x.dtype))
        view = View(images, whole(rows * columns), repeated(self._rotary(down, across), images))
        deep = []
        for index, layer in enumerate(self._layers):
            x = layer(x, view)
            if index in self._deep:
                deep.append(self._deep[index](x))
        return torch.cat([self._merger(x), *deep], dim=1).view(images, grid[0] * grid[1], -1)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """The table of places with so many rows and columns, corners on corners, line by line."""
        plane = F.interpolate(
            self._places, size=(rows, columns), mode="bilinear", align_corners=True
        )
        return plane[0].flatten(1).t()


class Merger:
    """`each` rows side by side become one, by two layers; normed before, or if `late` then."""

    def __init__(
        self, w: TensorScope, sizes: VisionSizes, each: int, *names: str, late: bool
    ) -> None:
        norm, first, second = names
        self._wide, self._late = sizes.hidden * each, late
        normed = self._wide if late else sizes.hidden
        self._norm = w.layer_norm(norm, sizes.eps, size=normed)
        self.width = (w.shape(second) or (1,))[0]
        self._first = w.linear(first, shape=(self._wide, self._wide))
        self._second = w.linear(second, shape=(self.width, self._wide))
        self.row_elements = 5 * self._wide + 4 * self.width

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows / each, width]."""
        if self._late:
            merged = self._norm(x.view(-1, self._wide))
        else:
            merged = self._norm(x).view(-1, self._wide)
        return self._second(gelu_erf(self._first(merged)))


def build_tower(w: TensorScope, metadata: Metadata, *, images: ImageBounds) -> DeepTower:
    """From a file of its own, or from the one that the text model is in; for such images."""
    return DeepTower(w, metadata, images)


def _layer(w: TensorScope, sizes: VisionSizes) -> EncoderLayer:
    feed_forward = read_feed_forward(w, sizes, LAYER, gelu)
    return read_layer(w, sizes, LAYER, layer_norms(w, sizes), feed_forward)


def _places(w: TensorScope, sizes: VisionSizes) -> Tensor:
    """float32 [1, hidden, side, side]: of a square whose side the table's length tells."""
    name = known_as(w, "position_embd", "pos_embed")
    count = (w.shape(name) or (PLACES,))[0]
    side = isqrt(count)
    if side * side != count:
        raise sizes.metadata.error(
            "vision.patch_size", f"has a table of {count:,} places, no square"
        )
    table = w.table(f"{name}.weight", shape=(count, sizes.hidden))
    return table.t().reshape(1, sizes.hidden, side, side)


def _last_merger(w: TensorScope, sizes: VisionSizes, each: int) -> Merger:
    names = (
        known_as(w, "v.post_ln", "v.merger.norm"),
        known_as(w, "mm.0", "v.merger.linear_fc1"),
        known_as(w, "mm.2", "v.merger.linear_fc2"),
    )
    return Merger(w, sizes, each, *names, late=False)


def _deep_mergers(v: TensorScope, sizes: VisionSizes, each: int) -> dict[int, Merger]:
    """By the layer whose output they take, in order."""
    mergers = {}
    for number, layer in enumerate(_deep_layers(sizes.metadata, sizes.layers)):
        w = v.scope("deepstack", layer)
        if sizes.metadata.architecture != "clip":
            w = v.scope("deepstack_merger", number)
        first, second = known_as(w, "fc1", "linear_fc1"), known_as(w, "fc2", "linear_fc2")
        mergers[layer] = Merger(w, sizes, each, "norm", first, second, late=True)
    return mergers


def _deep_layers(metadata: Metadata, layers: int) -> Sequence[int]:
    if metadata.architecture == "clip":
        flags = metadata.get_array("vision.is_deepstack_layers", bool) or ()
        listed = tuple(index for index, deep in enumerate(flags) if deep)
    else:
        stated = metadata.get_array("vision.deepstack_visual_indexes", int)
        listed = DEEP_LAYERS if stated is None else stated
    if list(listed) != sorted(set(listed)) or not all(0 <= layer < layers for layer in listed):
        raise metadata.error(
            "vision.deepstack_visual_indexes", f"names {listed} of {layers} layers, out of order"
        )
    return listed


def _deep(config: Configuration) -> list[int]:
    return list(config.require("deepstack_visual_indexes"))


def _is_deep(config: Configuration) -> list[bool]:
    return [layer in _deep(config) for layer in range(config.layers)]


def _deep_rules(source: str, llama_cpp: str, ollama: str) -> tuple[Rule, Rule]:
    """llama.cpp's files count the layers, the others the mergers."""
    stored = f"deepstack_merger_list.{{n}}.{source}.*"
    return (
        Rule(
            stored,
            f"v.deepstack.{{n}}.{llama_cpp}.*",
            only=lambda c, n: n in _deep(c),
            layer=lambda c, n: _deep(c)[n] if n < len(_deep(c)) else None,
            flavours=(LLAMA_CPP,),
        ),
        Rule(
            stored,
            f"v.deepstack_merger.{{n}}.{ollama}.*",
            only=lambda c, n: n < len(_deep(c)),
            flavours=(OLLAMA,),
        ),
    )


def _table_side(config: Configuration) -> int:
    """In pixels, as readers of llama.cpp's files want it."""
    return isqrt(config.require_size("num_position_embeddings")) * config.require_size("patch_size")


_MODULES = (
    ("norm1", "ln1", "norm1"),
    ("attn.proj", "attn_out", "attn_out"),
    ("norm2", "ln2", "norm2"),
    ("mlp.linear_fc1", "ffn_up", "mlp.linear_fc1"),
    ("mlp.linear_fc2", "ffn_down", "mlp.linear_fc2"),
)
VISION = Conversion(
    serves=("Qwen3VLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen3vl"},
    keys=(
        *towers.SIZES,
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        Key("vision.temporal_patch_size", "temporal_patch_size", flavours=(OLLAMA,)),
        Key("vision.num_channels", "in_channels", flavours=(OLLAMA,)),
        Key("vision.num_positional_embeddings", "num_position_embeddings", flavours=(OLLAMA,)),
        Key("vision.deepstack_visual_indexes", _deep, flavours=(OLLAMA,)),
        Key("vision.rope.freq_base", towers.rope_base, flavours=(OLLAMA,)),
        Key("vision.longest_edge", towers.most_pixels, flavours=(OLLAMA,)),
        Key("vision.shortest_edge", towers.least_pixels, flavours=(OLLAMA,)),
        towers.epsilon(EPS, OLLAMA),
        *towers.clip("qwen3vl_merger", towers.STANDARD, eps=EPS),
        Key("use_gelu", lambda c: True, flavours=(LLAMA_CPP,)),
        Key("vision.image_size", _table_side, flavours=(LLAMA_CPP,)),
        Key("vision.is_deepstack_layers", _is_deep, flavours=(LLAMA_CPP,)),
        Key("vision.image_max_pixels", towers.most_pixels, flavours=(LLAMA_CPP,)),
        Key("vision.image_min_pixels", towers.least_pixels, flavours=(LLAMA_CPP,)),
    ),
    rules=(
        *(
            Rule(
                "patch_embed.proj.weight",
                f"v.{name}",
                towers.frame(index),
                flavours=(LLAMA_CPP,),
            )
            for index, name in enumerate(FILE_FRAMES)
        ),
        Rule("patch_embed.proj.bias", "v.patch_embd.bias", flavours=(LLAMA_CPP,)),
        Rule("patch_embed.proj.weight", "v.patch_embed.weight", towers.stacked, flavours=(OLLAMA,)),
        Rule("patch_embed.proj.bias", "v.patch_embed.bias", flavours=(OLLAMA,)),
        *towers.both("pos_embed.weight", "v.position_embd.weight", "v.pos_embed.weight"),
        Rule("blocks.{n}.attn.qkv.*", "v.blk.{n}.attn_qkv.*", flavours=(LLAMA_CPP,)),
        *towers.split_qkv("blocks.{n}.attn.qkv.*", "v.blk.{n}.attn_{}.*", OLLAMA),
        *(
            rule
            for module, llama_cpp, ollama in _MODULES
            for rule in towers.both(
                f"blocks.{{n}}.{module}.*",
                f"v.blk.{{n}}.{llama_cpp}.*",
                f"v.blk.{{n}}.{ollama}.*",
            )
        ),
        *towers.both("merger.norm.*", "v.post_ln.*", "v.merger.norm.*"),
        *towers.both("merger.linear_fc1.*", "mm.0.*", "v.merger.linear_fc1.*"),
        *towers.both("merger.linear_fc2.*", "mm.2.*", "v.merger.linear_fc2.*"),
        *_deep_rules("norm", "norm", "norm"),
        *_deep_rules("linear_fc1", "fc1", "linear_fc1"),
        *_deep_rules("linear_fc2", "fc2", "linear_fc2"),
    ),
    roots=towers.roots("visual"),
    drop=towers.TEXT,
    defaults={
        "spatial_merge_size": MERGED,
        "temporal_patch_size": FRAMES,
        "in_channels": 3,
        "num_position_embeddings": PLACES,
        "deepstack_visual_indexes": list(DEEP_LAYERS),
    },
    spellings={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("in_channels", 3),
        towers.known_setting("temporal_patch_size", FRAMES),
    ),
    checks={LLAMA_CPP: towers.known_rope_base(DEFAULT_BASE)},
)
VISION_OF_EXPERTS = replace(
    VISION,
    serves=("Qwen3VLMoeForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen3vlmoe"},
)

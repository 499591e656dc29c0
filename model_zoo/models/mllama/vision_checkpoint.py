"""Llama 3.2 Vision (mllama): conversion of vision checkpoints to GGUF."""

from functools import partial

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OLLAMA, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import interleaved
from model_zoo.images.tiling import grids
from model_zoo.models.mllama.vision import EPS, KEPT_LAYERS, TILES
from runtime.errors import UnsupportedModelError


def _same_grids(config: Configuration) -> None:
    """Checks the grids of tiles: files do not list them, and readers assume this order."""
    slots, stated = config.require_size("max_num_tiles"), config.get("supported_aspect_ratios")
    if stated is not None and [tuple(grid) for grid in stated] != grids(slots):
        raise UnsupportedModelError(
            f"{config.path}: `supported_aspect_ratios` must be all grids of at most {slots} tiles, "
            "by rows, then columns; files of this architecture do not list them."
        )


def _opened(config: Configuration, gate: Tensor) -> Tensor:
    return gate.float().tanh()


def _closed(config: Configuration, gate: Tensor) -> Tensor:
    return 1 - gate.float().tanh()


def _is_global(config: Configuration, layer: int) -> bool:
    return layer < config.require_size("num_global_layers")


_TURNED = interleaved("num_attention_heads")  # as in all files, although they are not rotated


_MODULES: tuple[tuple[str, str, Transform | None], ...] = (
    ("input_layernorm", "attn_norm", None),
    ("self_attn.q_proj", "attn_q", _TURNED),
    ("self_attn.k_proj", "attn_k", _TURNED),
    ("self_attn.v_proj", "attn_v", None),
    ("self_attn.o_proj", "attn_output", None),
    ("post_attention_layernorm", "ffn_norm", None),
    ("mlp.fc1", "ffn_up", None),
    ("mlp.fc2", "ffn_down", None),
)


_kept = partial(Rule, keep=True)


VISION = Conversion(
    serves=("MllamaForConditionalGeneration",),
    architecture={OLLAMA: "mllama"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        towers.epsilon("norm_eps"),
        Key("vision.global.block_count", "num_global_layers"),
        Key("vision.intermediate_layers_indices", "intermediate_layers_indices"),
        Key("vision.max_num_tiles", "max_num_tiles"),
        Key("vision.num_channels", "num_channels"),
    ),
    rules=(
        Rule("patch_embedding.weight", "v.patch_embd.weight"),
        _kept("class_embedding", "v.class_embd"),
        _kept("gated_positional_embedding.embedding", "v.position_embd.weight"),
        _kept("gated_positional_embedding.gate", "v.position_embd.gate", _closed),
        _kept("gated_positional_embedding.gate", "v.tile_position_embd.gate", _opened),
        Rule("gated_positional_embedding.tile_embedding.weight", "v.tile_position_embd.weight"),
        *(
            rule
            for place in ("pre_tile", "post_tile")
            for rule in (
                Rule(
                    f"{place}_positional_embedding.embedding.weight",
                    f"v.{place}_position_embd.weight",
                ),
                _kept(
                    f"{place}_positional_embedding.gate", f"v.{place}_position_embd.gate", _opened
                ),
            )
        ),
        Rule("layernorm_pre.*", "v.pre_ln.*"),
        Rule("layernorm_post.*", "v.post_ln.*"),
        *(
            Rule(
                f"{part}transformer.layers.{{n}}.{module}.*",
                f"v.{part.replace('_', '.')}blk.{{n}}.{name}.*",
                transform,
                only=_is_global if part else None,
            )
            for part in ("", "global_")
            for module, name, transform in _MODULES
        ),
        *(
            _kept(
                f"global_transformer.layers.{{n}}.gate_{stored}",
                f"v.global.blk.{{n}}.{stored}_gate",
                _opened,
                only=_is_global,
            )
            for stored in ("attn", "ffn")
        ),
        Rule("multi_modal_projector.*", "mm.0.*"),
    ),
    roots=("model.vision_model.", "vision_model.", "model."),
    drop=towers.TEXT,
    defaults={
        "num_global_layers": 8,
        "intermediate_layers_indices": list(KEPT_LAYERS),
        "max_num_tiles": TILES,
        "num_channels": 3,
        "norm_eps": EPS,
    },
    spellings={"num_attention_heads": "attention_heads"},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("num_channels", 3),
        _same_grids,
    ),
)

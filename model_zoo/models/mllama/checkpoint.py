"""Llama 3.2 Vision (mllama): conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OLLAMA, Conversion, Key, Rule
from model_zoo.convert.transforms import interleaved


def _attends_to_images(config: Configuration, layer: int) -> bool:
    return layer in config.require("cross_attention_layers")


def _attends_to_text(config: Configuration, layer: int) -> bool:
    return not _attends_to_images(config, layer)


CONVERSION = Conversion(
    serves=("MllamaForConditionalGeneration", "MllamaForCausalLM"),
    architecture={OLLAMA: "mllama"},
    keys=(
        *decoders.KEYS,
        Key("attention.cross_attention_layers", "cross_attention_layers", of=list),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True, only=_attends_to_text),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
        # Rows of q and k are permuted as in all files of this family, although not rotated.
        *(
            Rule(
                f"layers.{{n}}.cross_attn.{name}.weight",
                f"blk.{{n}}.cross_attn_{name}.weight",
                transform,
                only=_attends_to_images,
            )
            for name, transform in (
                ("q_proj", interleaved("num_attention_heads")),
                ("k_proj", interleaved("num_key_value_heads")),
                ("v_proj", None),
                ("o_proj", None),
                ("q_norm", None),
                ("k_norm", None),
            )
        ),
        *(
            Rule(f"layers.{{n}}.{gate}", f"blk.{{n}}.{gate}", only=_attends_to_images, keep=True)
            for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate")
        ),
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    drop=decoders.OTHER_PARTS,
    check=checks.only_scalings("llama3"),
)

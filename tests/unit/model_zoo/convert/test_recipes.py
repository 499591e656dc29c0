"""Recipes: the type of each tensor, with examples from real models."""

import gguf
import pytest

from model_zoo.convert.quantizers.rows import QUANTIZABLE
from model_zoo.convert.recipes import (
    RECIPES,
    Facts,
    facts_of_names,
    file_type,
    recipe_named,
    tensor_type,
)
from runtime.errors import ConfigurationError
from runtime.quant.block_types import block_type

# Llama 3.1 8B: 32 layers, 8 key heads for 32 heads.
LLAMA = Facts(layers=32, experts=0, kv_sharing=4, tied=False)
MATRIX = (4096, 4096)
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
PLAIN = ("f32", "f16", "bf16")
QUANTISED = [name for name in RECIPES if name not in PLAIN]
# Names of `general.file_type` in the `gguf` package.
FILE_TYPES = {
    "f32": "ALL_F32",
    "q3_k_s": "MOSTLY_Q3_K_S",
    "mxfp4": "MOSTLY_MXFP4_MOE",
}


def layer_types(recipe: str, part: str, facts: Facts = LLAMA) -> list[str]:
    return [
        tensor_type(recipe, f"blk.{n}.{part}.weight", MATRIX, facts) for n in range(facts.layers)
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_type_of_a_recipe_can_be_written(recipe):
    chosen = RECIPES[recipe]
    assert {chosen.base, chosen.output, *(rule.type for rule in chosen.rules)} <= QUANTIZABLE


@pytest.mark.parametrize("recipe", RECIPES)
def test_file_types_are_those_of_the_format(recipe):
    name = FILE_TYPES.get(recipe, f"MOSTLY_{recipe.upper()}")
    assert file_type(recipe) == gguf.LlamaFileType[name]


def test_medium_recipes_give_more_bits_to_the_ends_and_every_third_layer():
    more = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
    for recipe, base in (("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")):
        expected = ["Q6_K" if n in more else base for n in range(32)]
        assert layer_types(recipe, "ffn_down") == expected
        assert layer_types(recipe, "attn_v") == expected
        assert set(layer_types(recipe, "ffn_up")) == {base}


def test_first_layers_get_more_bits_in_the_small_recipe():
    assert layer_types("q4_k_s", "attn_v") == ["Q5_K"] * 4 + ["Q4_K"] * 28
    assert layer_types("q4_k_s", "ffn_down") == ["Q5_K"] * 4 + ["Q4_K"] * 28


def test_value_matrices_are_counted_where_not_every_layer_has_one():
    names = [f"blk.{n}.attn_v.weight" for n in range(3, 32, 4)]  # eight
    facts = facts_of_names(names, layers=32)
    types = [tensor_type("q4_k_m", name, MATRIX, facts) for name in names]
    assert types == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert tensor_type("q4_k_s", names[3], MATRIX, facts) == "Q5_K"
    assert tensor_type("q4_k_s", names[4], MATRIX, facts) == "Q4_K"


@pytest.mark.parametrize("recipe", QUANTISED)
def test_the_output_matrix_gets_more_bits_even_if_tied(recipe):
    precise = {"Q6_K", "Q8_0"}
    assert tensor_type(recipe, "output.weight", MATRIX, LLAMA) in precise
    tied = Facts(layers=32, tied=True)
    for name in EMBEDDINGS:
        assert tensor_type(recipe, name, MATRIX, tied) in precise


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_an_untied_embedding_gets_the_base_type(name):
    assert tensor_type("q4_k_m", name, MATRIX, LLAMA) == "Q4_K"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output_norm.weight", (4096,)),
        ("blk.3.attn_norm.weight", (4096,)),
        ("blk.3.attn_q_norm.weight", (32, 128)),
        ("blk.3.attn_q.bias", (4096,)),
        ("blk.3.ffn_gate_inp.weight", (8, 4096)),
        ("blk.3.ffn_gate_exps.bias", (32, 2880)),
        ("blk.3.ssm_conv1d.weight", (8192, 4)),
        ("blk.3.ffn_gate_inp_shexp.weight", (1, 2048)),
        ("rope_freqs.weight", (64,)),
        ("v.position_embd.weight", (4096, 1152)),
        ("v.blk.0.ln1.weight", (1152,)),
    ],
)
def test_small_tensors_stay_float32(recipe, name, shape):
    assert tensor_type(recipe, name, shape, LLAMA) == "F32"


@pytest.mark.parametrize("recipe", QUANTISED)
@pytest.mark.parametrize("name", ["v.blk.0.attn_q.weight", "mm.0.weight", "v.patch_embd.weight"])
def test_image_encoders_keep_half_precision(recipe, name):
    assert tensor_type(recipe, name, (1152, 1152), LLAMA) == "F16"


@pytest.mark.parametrize("recipe", PLAIN)
def test_plain_recipes_give_every_matrix_one_type(recipe):
    names = ("token_embd.weight", "blk.0.attn_v.weight", "v.blk.0.attn_q.weight", "mm.0.weight")
    assert {tensor_type(recipe, name, MATRIX, LLAMA) for name in names} == {recipe.upper()}


def test_attention_of_models_with_eight_experts_gets_more_bits():
    mixtral = Facts(layers=32, experts=8, kv_sharing=4)
    assert set(layer_types("q4_k_m", "attn_k", mixtral)) == {"Q8_0"}
    assert set(layer_types("q4_k_m", "attn_v", mixtral)) == {"Q8_0"}
    assert set(layer_types("q4_k_m", "attn_output", mixtral)) == {"Q5_K"}


def test_experts_get_the_types_of_feed_forward_matrices():
    shape = (64, 2048, 1024)
    names = ("blk.0.ffn_down_exps.weight", "blk.4.ffn_down_exps.weight", "blk.0.ffn_up_exps.weight")
    many = Facts(layers=32, experts=64)
    assert [tensor_type("q4_k_m", name, shape, many) for name in names] == ["Q6_K", "Q4_K", "Q4_K"]


def test_mxfp4_is_for_experts_alone():
    many = Facts(layers=24, experts=32)
    experts = tensor_type("mxfp4", "blk.0.ffn_up_exps.weight", (32, 2880, 2880), many)
    assert experts == "MXFP4"
    assert tensor_type("mxfp4", "blk.0.attn_q.weight", (4096, 2880), many) == "Q8_0"


@pytest.mark.parametrize(
    ("recipe", "row", "expected"),
    [
        ("q2_k", 320, "Q4_0"),
        ("q3_k_s", 320, "Q4_0"),
        ("q4_k_s", 320, "Q5_0"),
        ("q5_k_s", 320, "Q5_1"),
        ("q6_k", 320, "Q8_0"),
        ("q4_k_s", 100, "F16"),
        ("q8_0", 100, "F16"),
    ],
)
def test_rows_that_blocks_do_not_divide_get_a_substitute(recipe, row, expected):
    assert tensor_type(recipe, "blk.9.attn_q.weight", (64, row), LLAMA) == expected


def test_recipes_are_ordered_by_size():
    """Bytes of a model of Llama 3.1's shape, without embeddings."""
    parts = {
        "attn_q": (4096, 4096),
        "attn_k": (1024, 4096),
        "attn_v": (1024, 4096),
        "attn_output": (4096, 4096),
        "ffn_gate": (14336, 4096),
        "ffn_up": (14336, 4096),
        "ffn_down": (4096, 14336),
    }
    sizes = []
    for recipe in "q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k q8_0 f16".split():
        names = [(f"blk.{n}.{part}.weight", s) for n in range(32) for part, s in parts.items()]
        kinds = [(tensor_type(recipe, name, shape, LLAMA), shape) for name, shape in names]
        sizes.append(sum(block_type(kind).row_bytes(s[1]) * s[0] for kind, s in kinds))
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)


def test_names_of_recipes_may_be_upper_case():
    assert recipe_named("Q4_K_M") is RECIPES["q4_k_m"]


def test_an_unknown_recipe_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigurationError, match=r"`q4_km`\. Did you mean `q4_k_m`\? .*q6_k"):
        tensor_type("q4_km", "output.weight", MATRIX, LLAMA)

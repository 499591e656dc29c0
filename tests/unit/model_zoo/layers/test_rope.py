"""Rotary embeddings from metadata: frequencies and magnitudes as `transformers` computes them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.layers.rope import Pairs, Rotary, axes_of
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.gguf_files import write_tensors

DIM, CONTEXT, ORIGINAL = 64, 4096, 512
SHORT = np.linspace(1.0, 1.5, DIM // 2).tolist()
LONG = np.linspace(1.0, 9.0, DIM // 2).tolist()
YARN_KEYS = {
    "scaling.type": "yarn",
    "scaling.factor": 8.0,
    "scaling.original_context_length": ORIGINAL,
}


@pytest.fixture
def read(tmp_path):
    """A function from keys below `rope.` and tensors to the rotary embedding of such a file."""

    def make(
        keys, *, tensors=None, context_tokens=None, device="cpu", key_dim=DIM, **options
    ) -> Rotary:
        path = write(tmp_path / "rope.gguf", tensors or {})
        values = {"general.architecture": "llama", "llama.context_length": CONTEXT}
        values |= {f"llama.rope.{name}": value for name, value in keys.items()}
        w = TensorScope(
            GGUFFile.open(path),
            device=torch.device(device),
            dtype=torch.float32,
            options=ScopeOptions(context_tokens=context_tokens),
        )
        options = {"default_base": DEFAULT_BASE} | options
        return read_rotary(w, sizes_of(Metadata(values, path=path), key_dim), Pairs.NEOX, **options)

    return make


def sizes_of(metadata: Metadata, key_dim: int) -> TextSizes:
    """Of one layer with one head."""
    heads = (1,)
    return TextSizes(metadata, 1, key_dim, CONTEXT, 1e-6, heads, heads, key_dim, key_dim, None)


def write(path: Path, tensors: dict[str, list[float]]) -> Path:
    lists = tensors | {"output_norm": [1.0]}
    return write_tensors(path, {f"{name}.weight": np.array(lists[name]) for name in lists})


def agrees(rotary: Rotary, parameters: dict, *, seq_len: int | None = None) -> None:
    """With what `transformers` makes of these rope parameters."""
    sizes = {"hidden_size": 4 * DIM, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    kind = parameters["rope_type"]
    parameters = {"rope_theta": 10000.0, **parameters}
    if kind == "longrope":
        own = {"original_max_position_embeddings": ORIGINAL, "pad_token_id": 0}
        config = Phi3Config(**sizes, **own, rope_parameters=parameters)
    else:
        config = LlamaConfig(**sizes, rope_parameters=parameters)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)
    torch.testing.assert_close(rotary.frequencies, frequencies, rtol=1e-6, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude, rel=1e-6)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}


def test_by_default_whole_heads_are_rotated_with_the_usual_base(read) -> None:
    rotary = read({})
    expected = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    torch.testing.assert_close(rotary.frequencies, expected)
    assert rotary.magnitude == 1.0
    torch.testing.assert_close(read({"freq_base": 5e5}).frequencies, plain_frequencies(DIM, 5e5))
    assert read({"dimension_count": 32}).frequencies.shape == (16,)
    assert read({"dimension_count": 32}, dim=DIM).frequencies.shape == (32,)


@pytest.mark.parametrize(
    "keys",
    [
        {"scaling.type": "linear", "scaling.factor": 4.0},
        {"scaling.factor": 4.0},
        {"scale_linear": 4.0},
    ],
    ids=lambda keys: ", ".join(keys),
)
def test_linear_scaling_agrees_in_every_spelling(read, keys) -> None:
    agrees(read(keys), {"rope_type": "linear", "factor": 4.0})


def test_the_scaling_type_none_disables_a_stated_factor(read) -> None:
    rotary = read({"scaling.type": "none", "scaling.factor": 4.0})
    torch.testing.assert_close(rotary.frequencies, plain_frequencies(DIM, 10000.0))


def test_factors_of_a_tensor_divide_the_frequencies(read) -> None:
    rotary = read({"freq_base": 5e5}, tensors={"rope_freqs": LONG})
    expected = plain_frequencies(DIM, 5e5) / torch.tensor(LONG)
    torch.testing.assert_close(rotary.frequencies, expected)


@pytest.mark.parametrize(
    "keys, parameters",
    [
        ({}, {}),
        ({"scaling.beta_fast": 8.0, "scaling.beta_slow": 2.0}, {"beta_fast": 8, "beta_slow": 2}),
        (
            {"scaling.yarn_beta_fast": 8.0, "scaling.yarn_beta_slow": 2.0},
            {"beta_fast": 8, "beta_slow": 2},
        ),
        ({"scaling.yarn_attn_factor": 0.6}, {"attention_factor": 0.6}),
        (
            {"scaling.mscale": 0.7, "scaling.mscale_all_dim": 1.2},
            {"mscale": 0.7, "mscale_all_dim": 1.2},
        ),
        ({"scaling.yarn_log_multiplier": 1.2}, {"mscale": 1.0, "mscale_all_dim": 1.2}),
        ({"scaling.beta_slow": 0.01}, {"beta_slow": 0.01}),
        ({"scaling.extrapolation_factor": 1.0}, {}),
        ({"scaling.yarn_ext_factor": -1.0}, {}),
    ],
    ids=str,
)
def test_yarn_agrees_in_every_spelling(read, keys, parameters) -> None:
    agrees(read(YARN_KEYS | keys), YARN | parameters)


def test_yarn_agrees_where_its_range_is_not_widened(read) -> None:
    agrees(read(YARN_KEYS, truncate=False), YARN | {"truncate": False})


def test_yarn_agrees_where_the_range_is_a_single_frequency(read) -> None:
    ends = {"scaling.beta_fast": 1e9, "scaling.beta_slow": 1e9}
    agrees(read(YARN_KEYS | ends), YARN | {"beta_fast": 1e9, "beta_slow": 1e9})


@pytest.mark.parametrize("more", [{}, {"scaling.mscale": 0.7, "scaling.mscale_all_dim": 1.2}])
def test_a_multiplier_comes_on_top_of_yarns_own_magnitude(read, more) -> None:
    plain = read(YARN_KEYS | more).magnitude
    scaled = read(YARN_KEYS | more | {"scaling.attn_factor": 0.5}).magnitude
    assert scaled == pytest.approx(plain / 2)


def test_an_architecture_may_mean_yarn_where_the_file_names_no_kind(read) -> None:
    keys = {name: value for name, value in YARN_KEYS.items() if name != "scaling.type"}
    agrees(read(keys, kind="yarn"), YARN)


def test_yarn_without_an_original_context_uses_the_whole_context(read) -> None:
    keys = {"scaling.type": "yarn", "scaling.factor": 8.0}
    agrees(read(keys), {"rope_type": "yarn", "factor": 8.0})
    agrees(read(keys, original_context=ORIGINAL), YARN)


@pytest.mark.parametrize(
    "served, expected", [(None, "long"), (CONTEXT, "long"), (ORIGINAL + 1, "long"), (ORIGINAL, "")]
)
def test_longrope_factors_depend_on_the_served_context(read, served, expected) -> None:
    keys = {"scaling.original_context_length": ORIGINAL}
    tensors = {"rope_factors_short": SHORT, "rope_factors_long": LONG}
    rotary = read(keys, tensors=tensors, context_tokens=served)
    parameters = {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": ORIGINAL,
    }
    agrees(rotary, parameters, seq_len=CONTEXT if expected else ORIGINAL)
    stated = read(keys | {"scaling.attn_factor": 1.25}, tensors=tensors)
    assert stated.magnitude == 1.25


@pytest.mark.parametrize("kind", ["dynamic", "ntk"])
def test_other_kinds_are_refused_by_name(read, kind) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"rope\.scaling\.type` is {kind}.*longrope"):
        read({"scaling.type": kind, "scaling.factor": 2.0})


def test_yarn_without_its_factor_is_refused_by_key(read) -> None:
    keys = {name: value for name, value in YARN_KEYS.items() if name != "scaling.factor"}
    with pytest.raises(ModelFileError, match=r"rope\.scaling.factor` is missing"):
        read(keys)


@pytest.mark.parametrize("keys", [{}, YARN_KEYS], ids=["plain", "yarn"])
def test_heads_of_an_odd_size_cannot_be_rotated_whole(read, keys) -> None:
    with pytest.raises(ModelFileError, match=r"attention\.key_length` is 63; .* need an even size"):
        read(keys, key_dim=63, dim=63)


def test_on_meta_nothing_is_computed(read) -> None:
    tensors = {"rope_freqs": LONG, "rope_factors_short": SHORT, "rope_factors_long": LONG}
    rotary = read({"scaling.original_context_length": ORIGINAL}, tensors=tensors, device="meta")
    assert rotary.frequencies.device == META


@pytest.mark.parametrize("pairs", Pairs)
def test_a_magnitude_scales_only_rotated_dimensions(pairs) -> None:
    frequencies, positions = plain_frequencies(8, 100.0), torch.tensor([0, 3, 50])
    x = torch.randn(3, 2, 12)
    plain = Rotary(frequencies, pairs)(positions)(x)
    longer = Rotary(frequencies, pairs, 1.5)(positions)(x)
    torch.testing.assert_close(longer[..., :8], 1.5 * plain[..., :8])
    assert torch.equal(longer[..., 8:], x[..., 8:]) and torch.equal(plain[..., 8:], x[..., 8:])
    torch.testing.assert_close(plain[0], x[0])


def test_sections_are_consecutive_or_interleaved() -> None:
    assert axes_of([2, 3, 3], 8, interleaved=False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert axes_of([4, 2, 2], 8, interleaved=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_each_frequency_rotates_by_the_position_on_its_axis() -> None:
    frequencies = torch.tensor([1.0, 0.5, 0.25])
    rotary = Rotary(frequencies, Pairs.NEOX, axes=torch.tensor([0, 1, 2]))
    positions = torch.tensor([[4, 5], [7, 5], [2, 5]])
    spread, plain = rotary(positions), rotary(torch.tensor([9, 5]))
    assert torch.equal(spread.cos[0], torch.tensor([4.0, 3.5, 0.5]).cos())
    assert torch.equal(spread.cos[1], plain.cos[1]) and torch.equal(spread.sin[1], plain.sin[1])

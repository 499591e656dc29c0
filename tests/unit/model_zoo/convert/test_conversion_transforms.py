"""Transformations of stored tensors: experts, rotated rows, published blocks."""

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.convert_folder import convert
from model_zoo.convert.transforms import interleaved
from model_zoo.models.glm4.checkpoint import in_halves
from runtime.errors import ModelFileError
from tests.tiny_models import write_tiny, write_tiny_folder
from tests.unit.model_zoo.convert.checkpoint_changes import SIZES, reshaped

GPT_OSS = GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
EXPERTS = "model.layers.1.mlp.experts"


def tensors(path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def floats(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def packed(weights: dict[str, torch.Tensor]) -> None:
    """Experts as in published gpt-oss: blocks of 32 four-bit weights, and their scales."""
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = weights.pop(name).shape
        shape = (experts, rows, inner // 32)
        for suffix, last, least in (("_blocks", (16,), 0), ("_scales", (), 110)):
            weights[name + suffix] = torch.randint(
                least, 256 if not least else 130, (*shape, *last), generator=generator
            ).to(torch.uint8)


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_published_blocks_are_kept(type, tmp_path) -> None:
    write_tiny_folder(tmp_path / "folder", GPT_OSS)
    reshaped(tmp_path / "folder", packed)
    kept: dict[str, torch.Tensor] = {}
    reshaped(tmp_path / "folder", kept.update)
    convert(tmp_path / "folder", tmp_path / "out.gguf", type=type)
    found = tensors(tmp_path / "out.gguf")
    expected = {}
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (kept[f"{EXPERTS}.{name}_{part}"] for part in ("blocks", "scales"))
        # [experts, in, out]
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    columns = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
    for part, chosen in columns.items():
        tensor = found[f"blk.1.ffn_{part}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        source = expected["down_proj" if part == "down" else "gate_up_proj"][:, :, chosen]
        assert np.array_equal(floats(tensor), source.transpose(1, 2).numpy()), part


def test_single_experts_are_stacked_in_order(tmp_path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=12)
    write_tiny_folder(tmp_path / "folder", config)
    stored: dict[str, torch.Tensor] = {}
    reshaped(tmp_path / "folder", stored.update)
    convert(tmp_path / "folder", tmp_path / "out.gguf", type="f32")
    found = tensors(tmp_path / "out.gguf")
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    for part, name in names.items():
        stacked = floats(found[f"blk.0.ffn_{part}_exps.weight"])
        assert len(stacked) == 12
        for expert, matrix in enumerate(stacked):
            source = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"
            assert np.array_equal(matrix, stored[source].numpy())


def test_a_missing_expert_is_reported(tmp_path) -> None:
    write_tiny_folder(tmp_path / "folder", MixtralConfig(**SIZES, num_local_experts=4))
    lost = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    reshaped(tmp_path / "folder", lambda weights: weights.pop(lost))
    with pytest.raises(ModelFileError, match=r"`blk\.0\.ffn_down_exps\.weight` lacks some"):
        convert(tmp_path / "folder", tmp_path / "out.gguf")


def test_stacks_of_experts_are_split_and_transposed_slice_by_slice(tmp_path) -> None:
    config = Llama4TextConfig(**SIZES, head_dim=16, num_local_experts=4, intermediate_size_mlp=80)
    twin = write_tiny(tmp_path / "out.gguf", config)
    found = tensors(tmp_path / "out.gguf")
    experts = twin.model.layers[0].feed_forward.experts
    gate, up = experts.gate_up_proj.transpose(1, 2).chunk(2, dim=1)
    down = experts.down_proj.transpose(1, 2)
    for part, expected in (("gate", gate), ("up", up), ("down", down)):
        assert np.array_equal(floats(found[f"blk.0.ffn_{part}_exps.weight"]), expected.numpy())


def test_rows_of_rotated_heads_are_interleaved(tmp_path) -> None:
    config = Configuration({"num_key_value_heads": 2}, path=tmp_path / "config.json")
    rows = torch.arange(16.0)[:, None].expand(16, 3)
    turned = interleaved("num_key_value_heads")(config, rows)
    one_head = [0, 4, 1, 5, 2, 6, 3, 7]
    assert turned[:, 0].tolist() == [*one_head, *(8 + row for row in one_head)]
    bias = interleaved("num_key_value_heads")(config, torch.arange(16.0))
    assert bias.tolist() == turned[:, 0].tolist()


def test_rotated_rows_of_glm_4v_are_in_halves_as_llama_cpps_converter_writes_them(tmp_path) -> None:
    settings = {"num_attention_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.75}
    config = Configuration(settings, path=tmp_path / "config.json")
    turned = in_halves("num_attention_heads")(config, torch.arange(16.0)[:, None].expand(16, 3))
    one_head = [0, 2, 4, 1, 3, 5, 6, 7]
    assert turned[:, 0].tolist() == [*one_head, *(8 + row for row in one_head)]
    bias = in_halves("num_attention_heads")(config, torch.arange(16.0))
    assert bias.tolist() == turned[:, 0].tolist()
    with pytest.raises(
        ModelFileError, match="has 2 as `num_attention_heads`, but there are 12 rows"
    ):
        in_halves("num_attention_heads")(config, torch.ones(12))


def test_a_stored_tied_head_is_left_out(tmp_path) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    write_tiny_folder(tmp_path / "folder", config)
    embedding = "model.embed_tokens.weight"
    reshaped(
        tmp_path / "folder",
        lambda weights: weights.update({"lm_head.weight": weights[embedding].clone()}),
    )
    convert(tmp_path / "folder", tmp_path / "out.gguf")
    assert "output.weight" not in tensors(tmp_path / "out.gguf")


def test_the_text_model_of_a_multimodal_checkpoint_is_converted(
    tmp_path,
) -> None:
    text = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    seeing = Gemma3Config(text_config=text, vision_config=vision)
    twin = write_tiny(tmp_path / "seeing.gguf", seeing)
    found = tensors(tmp_path / "seeing.gguf")
    assert not any(name.startswith(("v.", "mm.")) for name in found)
    norm = twin.model.language_model.layers[1].self_attn.q_norm.weight
    assert np.array_equal(floats(found["blk.1.attn_q_norm.weight"]), (norm + 1).numpy())
    write_tiny(tmp_path / "text.gguf", Gemma3TextConfig(**text))
    assert list(found) == list(tensors(tmp_path / "text.gguf"))


def test_buffers_of_older_software_are_left_out(tmp_path) -> None:
    write_tiny_folder(tmp_path / "folder", LlamaConfig(**SIZES))
    reshaped(
        tmp_path / "folder",
        lambda weights: weights.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        ),
    )
    convert(tmp_path / "folder", tmp_path / "out.gguf")
    assert not any("rot" in name for name in tensors(tmp_path / "out.gguf"))

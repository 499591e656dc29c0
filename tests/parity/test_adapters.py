"""Models with LoRA adapters compute what `peft` computes with `transformers`, unmerged."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.gguf.adapter import Adapter, AdapterPath
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.registry import class_for
from runtime.distributed.ranks import ALONE, Ranks
from runtime.worker.model import DecoderModel
from tests.adapter_files import peft_pairs, random_pairs, rounded, write_adapter
from tests.families.agreement import (
    Pair,
    check_bits_alone_and_in_a_batch,
    check_declared_memory,
    check_long_prompt,
    check_prompt_and_decoding,
    random_tokens,
)
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import matrices, rewrite
from tests.thread_ranks import Meeting
from tests.tiny_models import tiny_tokenizer, write_tiny_llama

MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 1e-4  # of log-probabilities
DIVIDED_TOLERANCE = 2e-5  # of logits, which are about one


def decoder_with(path: Path, *adapters: AdapterPath, ranks: Ranks = ALONE) -> DecoderModel:
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    options = ScopeOptions(ranks=ranks, adapters=[Adapter.open(adapter) for adapter in adapters])
    scope = TensorScope(file, device=torch.device("cpu"), dtype=torch.float32, options=options)
    decoder = class_for(metadata)(scope, metadata)
    scope.check()
    return decoder


def adapted(twin, name: str, targets: list[str], *, rank: int, alpha: float, model=None):
    """The twin with a random adapter of that name, beside those that `model` has."""
    import peft  # takes seconds, which processes without this test can do without

    torch.manual_seed(len(name))
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False
    )
    if model is None:
        model = peft.get_peft_model(twin, config, adapter_name=name)
    else:
        model.add_adapter(name, config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name and f".{name}" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def written(model, path: Path, name: str, architecture: str, kind: str = "F32") -> Path:
    alpha = model.peft_config[name].lora_alpha
    pairs = peft_pairs(model, name)
    return write_adapter(path, pairs, architecture=architecture, alpha=alpha, kind=kind)


def changes(model, pair: Pair, tokens: list[int]) -> float:
    """How far the adapters move the log-probabilities."""
    with model.disable_adapter():
        without = pair.expected(tokens)
    return (pair.expected(tokens) - without).abs().max().item()


@pytest.mark.parametrize(
    ("family", "config", "more"),
    [
        ("llama", "plain", ["embed_tokens", "lm_head"]),
        ("llama", "tied", ["embed_tokens"]),
        ("qwen2", "plain", ["lm_head"]),
        ("qwen3", "plain", []),
        ("gemma2", "plain", []),
        ("gemma3", "plain", []),
    ],
)
def test_an_adapter_computes_what_peft_computes(tmp_path, family, config, more) -> None:
    row = TEXT_MODELS[family]
    twin = row.write(tmp_path / "tiny.gguf", config)
    model = adapted(twin, "one", MATRICES + more, rank=4, alpha=6.0)
    path = written(model, tmp_path / "one.gguf", "one", family)
    decoder = decoder_with(tmp_path / "tiny.gguf", AdapterPath(path))
    pair = Pair(decoder, model, tiny_tokenizer().get_vocab_size())
    assert changes(model, pair, random_tokens(20, seed=1)) > 100 * TOLERANCE
    check_long_prompt(pair)
    check_prompt_and_decoding(pair)
    check_bits_alone_and_in_a_batch(pair)
    for tokens, outputs in ((1, 1), (120, 120)):
        check_declared_memory(decoder, tokens, outputs)


def test_stacked_adapters_with_scales_compute_what_peft_computes(tmp_path) -> None:
    twin = TEXT_MODELS["llama"].write(tmp_path / "tiny.gguf")
    model = adapted(twin, "one", MATRICES, rank=3, alpha=5.0)
    model = adapted(twin, "second", ["q_proj", "down_proj"], rank=8, alpha=8.0, model=model)
    model.base_model.set_adapter(["one", "second"])
    for module in model.modules():
        if "second" in getattr(module, "lora_A", ()):
            module.set_scale("second", -0.75)
    files = [written(model, tmp_path / f"{name}.gguf", name, "llama") for name in ("one", "second")]
    decoder = decoder_with(
        tmp_path / "tiny.gguf", AdapterPath(files[0]), AdapterPath(files[1], -0.75)
    )
    pair = Pair(decoder, model, tiny_tokenizer().get_vocab_size())
    check_long_prompt(pair)
    check_prompt_and_decoding(pair)


@pytest.mark.parametrize(
    ("type", "kind"), [("Q4_0", "F32"), ("Q8_0", "F16"), ("Q4_K", "Q8_0"), ("BF16", "BF16")]
)
def test_a_quantised_base_keeps_its_blocks(tmp_path, type, kind) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="rows_of_256", type=type)
    model = adapted(twin, "one", MATRICES, rank=4, alpha=6.0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.from_numpy(rounded(parameter.detach().numpy(), kind)))
    file = written(model, tmp_path / "one.gguf", "one", "llama", kind)
    assert {info.type.name for info in GGUFFile.open(file).tensors.values()} <= {kind, "F32"}
    decoder, base = decoder_with(path, AdapterPath(file)), decoder_with(path)
    assert decoder.weight_bytes == base.weight_bytes + sum(
        info.nbytes for info in GGUFFile.open(file).tensors.values()
    )
    pair = Pair(decoder, model, tiny_tokenizer().get_vocab_size())
    check_long_prompt(pair)


def fed(path: Path, adapters: list[AdapterPath], ranks: Ranks) -> Tensor:
    paged = PagedDecoder(decoder_with(path, *adapters, ranks=ranks))
    return paged.feed({0: random_tokens(41, seed=1)})


def merged(path: Path, pairs, factor: float) -> Path:
    """A copy of the file with the changes added to its matrices."""
    stated = matrices(path)
    changed = {name: stated[name] + factor * (up @ down) for name, (down, up) in pairs.items()}
    return rewrite(path, path.with_name("merged.gguf"), tensors=changed)


@pytest.mark.parametrize(
    ("family", "config", "pattern"),
    [
        ("phi3", "plain", ("attn_qkv", "ffn_up", "attn_output")),
        ("qwen3moe", "plain", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp")),
        ("gpt-oss", "plain", ("ffn_gate_exps", "ffn_down_exps", "attn_q")),
        ("llama4", "plain", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")),
        (
            "granitehybrid",
            "plain",
            ("ssm_in", "ssm_out", "attn_q", "ffn_down_exps", "ffn_up_shexp"),
        ),
        ("qwen3next", "plain", ("attn_qkv", "attn_gate", "ssm_out", "attn_q", "ffn_up_shexp")),
        ("lfm2", "plain", ("in_proj", "out_proj", "attn_q", "ffn_down")),
        ("deepseek2", "plain", ("attn_kv_a_mqa", "attn_output", "ffn_down")),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_an_adapter_computes_what_merged_matrices_compute(
    tmp_path, family, config, pattern, size
) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS[family].write(path, config)
    shapes = {
        name: array.shape
        for name, array in matrices(path).items()
        if name.endswith(".weight") and name.split(".")[-2] in pattern
    }
    assert len({name.split(".")[-2] for name in shapes}) == len(pattern)
    pairs = random_pairs(shapes, 3, size=0.1)
    file = write_adapter(tmp_path / "a.gguf", pairs, architecture=family, alpha=6.0)
    adapters = [AdapterPath(file, 0.5)]
    whole = fed(merged(path, pairs, 1.0), [], ALONE)
    finite = whole.isfinite()
    assert (fed(path, [], ALONE)[finite] - whole[finite]).abs().max() > 0.01
    for part in Meeting(size).each(partial(fed, path, adapters)):
        assert (part[finite] - whole[finite]).abs().max() <= 5 * DIVIDED_TOLERANCE


def test_an_adapter_of_one_matrix_changes_its_rows_of_a_fused_one(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["phi3"].write(path)
    stated = matrices(path)["blk.0.attn_qkv.weight"]
    rows = stated.shape[0] // 2  # of the queries: twice as many heads as keys or values
    pairs = random_pairs({"blk.0.attn_q.weight": (rows, stated.shape[1])}, 2)
    file = write_adapter(tmp_path / "a.gguf", pairs, architecture="phi3")
    down, up = pairs["blk.0.attn_q.weight"]
    padded = np.concatenate([up, np.zeros((rows, 2), np.float32)])
    expected = fed(merged(path, {"blk.0.attn_qkv.weight": (down, padded)}, 1.0), [], ALONE)
    for size in (1, 2):
        for part in Meeting(size).each(partial(fed, path, [AdapterPath(file)])):
            assert (part - expected).abs().max() <= DIVIDED_TOLERANCE


@pytest.mark.parametrize("config", ["gqa", "tied"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_divide_an_adapter_with_its_model(tmp_path, config, size) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config=config)
    model = adapted(twin, "one", [*MATRICES, "embed_tokens", "lm_head"], rank=4, alpha=6.0)
    adapters = [AdapterPath(written(model, tmp_path / "one.gguf", "one", "llama"), 0.5)]
    whole = fed(path, adapters, ALONE)
    for part in Meeting(size).each(partial(fed, path, adapters)):
        assert (part - whole).abs().max() <= DIVIDED_TOLERANCE

"""Models whose weights ranks divide among them give the logits of the whole, in every architecture.

Ranks are threads here; `tests/unit/runtime/test_parallel.py` has processes.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from model_zoo.families import FAMILIES
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.registry import class_for
from runtime.distributed.process_group import ProcessRanks
from runtime.distributed.ranks import ALONE, Ranks
from runtime.engine.request import ImageSpan
from runtime.worker.model import DecoderModel
from tests.parity import (
    image_rows,
    test_command_r,
    test_encoders,
    test_gemma2,
    test_gemma3,
    test_gemma4,
    test_glm4,
    test_gptoss,
    test_granite,
    test_llama4,
    test_mistral3,
    test_mixtral,
    test_mllama,
    test_phi3,
    test_qwen2,
    test_qwen3,
    test_qwen3moe,
    test_qwen3next,
    test_qwen3vl,
    test_qwen25vl,
    test_qwen35,
)
from tests.parity.agreement import check_declared_memory, random_tokens
from tests.parity.paged_decoder import PagedDecoder
from tests.thread_ranks import Meeting
from tests.tiny_models import TinyLlama, write_tiny, write_tiny_llama

TOLERANCE = 2e-5  # of logits, which are about one
# What ranks divide in each architecture: at least one configuration for every kind of layer.
CONFIGS: dict[str, PreTrainedConfig] = {
    "command-r": test_command_r.CONFIGS["biases"],
    "gemma2": test_gemma2.CONFIGS["plain"],
    "gemma3": test_gemma3.CONFIGS["capped_logits"],
    "gemma4": test_gemma4.CONFIGS["all_at_once"],
    "glm4": test_glm4.CONFIGS["plain"],
    "gpt-oss": test_gptoss.CONFIGS["plain"],
    "granite": test_granite.CONFIGS["dense"],
    "granitemoe": test_granite.CONFIGS["experts"],
    "llama4": test_llama4.CONFIGS["experts_in_every_other_layer"],
    "mistral3": test_mistral3.CONFIGS["temperature"],
    "mixtral": test_mixtral.CONFIGS["plain"],
    "phi3": test_phi3.CONFIGS["window"],
    "qwen2": test_qwen2.CONFIGS["tied"],
    "qwen3": test_qwen3.CONFIGS["biases"],
    "qwen3moe": test_qwen3moe.CONFIGS["plain"],
    "qwen3next": test_qwen3next.CONFIGS["plain"],
    "qwen35": test_qwen35.CONFIGS["dense"],
    "qwen35moe": test_qwen35.CONFIGS["experts"],
    "qwen3vl": test_qwen3vl.CONFIGS["plain"],
    "qwen3vlmoe": test_qwen3vl.CONFIGS["experts"],
    "qwen25vl": test_qwen25vl.CONFIGS["plain"],
}
# Heads that go into few ranks, and more ranks than key heads.
UNEVEN = TinyLlama(heads=6, kv_heads=3, head_dim=8, hidden=96, biases=True, padding_rows=3)


def decoder_of(path: Path, ranks: Ranks = ALONE) -> DecoderModel:
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    scope = TensorScope(file, device=torch.device("cpu"), dtype=torch.float32, ranks=ranks)
    decoder = class_for(metadata)(scope, metadata)
    scope.check()
    return decoder


def fed(path: Path, ranks: Ranks) -> Tensor:
    """Logits of two prompts in one step, a further part of one, and a token more for both."""
    paged = PagedDecoder(decoder_of(path, ranks))
    one, two = random_tokens(41, seed=1), random_tokens(24, seed=2)
    steps = [{0: one[:20], 1: two[:23]}, {0: one[20:40]}, {1: two[23:], 0: one[40:]}]
    return torch.cat([paged.feed(step) for step in steps])


def check_division(path: Path, sizes: tuple[int, ...]) -> None:
    whole = fed(path, ALONE)
    finite = whole.isfinite()
    assert finite.any()
    for size in sizes:
        for part in Meeting(size).each(partial(fed, path)):
            assert (part.isfinite() == finite).all()
            assert (part[finite] - whole[finite]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_two_ranks_are_those_of_one(tmp_path, name: str) -> None:
    write_tiny(tmp_path / "tiny.gguf", CONFIGS[name])
    check_division(tmp_path / "tiny.gguf", (2,))


@pytest.mark.parametrize("config", ["gqa", "tied", "biases", "llama3_rope", UNEVEN], ids=str)
def test_heads_go_into_any_number_of_ranks_up_to_theirs(tmp_path, config) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf", config=config)
    check_division(tmp_path / "tiny.gguf", (2, 3, 4))


def test_images_at_the_side_are_divided_too(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = image_rows.write_seeing(path, test_mllama.CONFIGS["plain"])
    del twin
    pictures = [image_rows.Picture(6, 2, b"a"), image_rows.Picture(17, 1, b"b")]
    tokens = random_tokens(30, seed=4)

    def seen(ranks: Ranks) -> Tensor:
        paged = PagedDecoder(decoder_of(path, ranks))
        test_mllama.show(paged, 0, pictures)
        return torch.cat([paged.feed({0: tokens[:20]}), paged.feed({0: tokens[20:]})])

    whole = seen(ALONE)
    known = whole.isfinite()
    for part in Meeting(2).each(seen):
        assert (part[known] - whole[known]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
def test_encoders_are_divided_too(tmp_path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, test_encoders.CONFIGS[name], maker=AutoModel)
    tokens = random_tokens(41, seed=3)

    def states(ranks: Ranks) -> Tensor:
        paged = PagedDecoder(decoder_of(path, ranks))
        paged.show(0, [(ImageSpan(0, 41, whole=True, digest=b""), torch.empty(0, 0))])
        return paged.states({0: tokens})

    whole = states(ALONE)
    for part in Meeting(3).each(states):
        assert (part - whole).abs().max() <= TOLERANCE


def test_every_rank_holds_its_part_of_weights_and_cache(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="mha")
    whole = decoder_of(path)
    parts = Meeting(2).each(partial(decoder_of, path))
    norms = whole.weight_bytes - sum(part.weight_bytes for part in parts)
    assert 0 >= norms > -0.02 * whole.weight_bytes  # both have the norms
    for one, part in zip(whole.cache_layers, parts[1].cache_layers, strict=True):
        assert part.kv_heads == one.kv_heads // 2


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(tmp_path, name: str) -> None:
    """Nor on how many of them the ranks exchange at once."""
    path = tmp_path / "tiny.gguf"
    write_tiny(path, CONFIGS[name])
    one, two = random_tokens(41, seed=7), random_tokens(29, seed=8)

    def fed_both_ways(ranks: Ranks) -> tuple[Tensor, Tensor]:
        together, apart = (PagedDecoder(decoder_of(path, ranks)) for _ in range(2))
        whole = apart.feed({0: one})
        rows = [apart.feed({1: two[:5]}), apart.feed({1: two[5:]})]
        return together.feed({1: two, 0: one}), torch.cat([*rows, whole])

    for together, apart in Meeting(3).each(fed_both_ways):
        assert torch.equal(together, apart)


@pytest.mark.parametrize("name", ["gemma4", "gpt-oss", "qwen3next"])
def test_a_rank_needs_no_more_than_it_declares(tmp_path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, CONFIGS[name])
    decoder = decoder_of(path, Echo(0, 4, torch.device("cpu")))
    for tokens, outputs in ((1, 1), (120, 3), (120, 120)):
        check_declared_memory(decoder, tokens, outputs)


class Echo(ProcessRanks):
    """Ranks that all bring the same."""

    def of_all(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = x.new_empty(self.size * x.numel())
        return parts.view(self.size, *x.shape).copy_(x).unbind()


def test_what_is_divided_is_one_list() -> None:
    assert [f.folder for f in FAMILIES if not f.tensor_parallel] == ["gemma3n", "olmo2"]

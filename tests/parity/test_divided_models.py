"""Tensor parallel models give the logits of undivided ones, in every architecture.

Ranks are threads here; `tests/unit/runtime/distributed/test_ranks.py` has processes.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from model_zoo.families import FAMILIES
from runtime.distributed.process_group import ProcessRanks
from runtime.distributed.ranks import ALONE, Ranks
from runtime.engine.request import ImageSpan
from runtime.worker.model import DecoderModel
from tests.families import image_rows
from tests.families.agreement import check_declared_memory, load_decoder, random_tokens
from tests.families.encoder_configs import ENCODERS, LARGE
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.parity.vision import test_mllama
from tests.thread_ranks import Meeting
from tests.tiny_models import TinyLlama, write_tiny, write_tiny_llama

TOLERANCE = 2e-5  # of logits, which are about one
DIVIDED = [name for name, row in TEXT_MODELS.items() if row.divided]
# Heads that go into few ranks, and more ranks than key heads.
UNEVEN = TinyLlama(heads=6, kv_heads=3, head_dim=8, hidden=96, biases=True, padding_rows=3)


def decoder_of(path: Path, ranks: Ranks = ALONE) -> DecoderModel:
    return load_decoder(path, ranks=ranks)


def fed(path: Path, ranks: Ranks) -> Tensor:
    """Logits of two prompts in one step, a chunk of one, and a token of both."""
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


@pytest.mark.parametrize("family", DIVIDED)
def test_logits_of_two_ranks_are_those_of_one(tmp_path, family: str) -> None:
    row = TEXT_MODELS[family]
    row.write(tmp_path / "tiny.gguf", row.divided)
    check_division(tmp_path / "tiny.gguf", (2,))


@pytest.mark.parametrize("config", ["gqa", "tied", "biases", "llama3_rope", UNEVEN], ids=str)
def test_heads_are_divided_among_any_number_of_ranks_up_to_theirs(tmp_path, config) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf", config=config)
    check_division(tmp_path / "tiny.gguf", (2, 3, 4))


def test_cross_attention_to_images_is_divided(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["mllama"].write(path)
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


@pytest.mark.parametrize("name", LARGE)
def test_text_encoders_are_divided(tmp_path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, ENCODERS[name], maker=AutoModel)
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


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(tmp_path, family: str) -> None:
    """Nor on how many of them the ranks exchange at once."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS[family].write(path, TEXT_MODELS[family].divided)
    one, two = random_tokens(41, seed=7), random_tokens(29, seed=8)

    def fed_both_ways(ranks: Ranks) -> tuple[Tensor, Tensor]:
        together, apart = (PagedDecoder(decoder_of(path, ranks)) for _ in range(2))
        whole = apart.feed({0: one})
        rows = [apart.feed({1: two[:5]}), apart.feed({1: two[5:]})]
        return together.feed({1: two, 0: one}), torch.cat([*rows, whole])

    for together, apart in Meeting(3).each(fed_both_ways):
        assert torch.equal(together, apart)


@pytest.mark.parametrize("family", ["gemma4", "gpt-oss", "qwen3next"])
def test_a_rank_needs_no_more_than_it_declares(tmp_path, family: str) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS[family].write(path, TEXT_MODELS[family].divided)
    decoder = decoder_of(path, Echo(0, 4, torch.device("cpu")))
    for tokens, outputs in ((1, 1), (120, 3), (120, 120)):
        check_declared_memory(decoder, tokens, outputs)


class Echo(ProcessRanks):
    """Ranks that all contribute the same tensor."""

    def of_all(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = x.new_empty(self.size * x.numel())
        return parts.view(self.size, *x.shape).copy_(x).unbind()


def test_families_that_ranks_cannot_divide_are_these() -> None:
    undivided = [f.folder for f in FAMILIES if not f.tensor_parallel]
    assert undivided == "bitnet gemma3n jina_bert_v2 minimax_m2 olmo2 olmoe".split()

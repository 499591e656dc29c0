"""Checks of every text decoder against `transformers`, float32 and eager.

`text_families.py` names tiny configurations; CHECKS run on a `Pair` of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.registry import class_for
from runtime.kernels.native import library
from runtime.kv.cache_types import CacheType
from runtime.worker.model import DecoderModel, KeyRotation
from tests.families.paged_decoder import PagedDecoder
from tests.gguf_files import matrices, rewrite
from tests.memory_profile import peak_bytes, recorded_memory
from tests.tiny_models import tiny_tokenizer, write_tiny

CPU = torch.device("cpu")
# Of log-probabilities. On a processor with AMX, Qwen 3.5 has a row with an error of 1.01e-4.
TOLERANCE = 1.5e-4
# Longer than every window and chunk of the tiny models; LONG fills a sequence's pages.
PROMPT, DECODED, LONG = 41, 8, 120
# Steps of one token: more than a convolution sees, the last at the begin of a page and of a chunk.
STEPS = range(45, 49)
# Of a decoder whose weights stay quantised, against its own with the same weights in float32.
QUANTIZED_TOLERANCE = 1e-4
QUANTIZED_TYPES = ("q8_0", "q4_k_m")  # the second has matrices of Q4_K and of Q6_K


@dataclass(frozen=True)
class Pair:
    """A loaded decoder and its twin in `transformers`; `known` tokens of the vocabulary exist."""

    decoder: DecoderModel
    twin: Any
    known: int

    def expected(self, tokens: list[int]) -> Tensor:
        """Log-probabilities [tokens, known] of the whole sequence at once."""
        with torch.inference_mode():
            logits = self.twin(torch.tensor([tokens])).logits[0]
        return logits[:, : self.known].log_softmax(-1)

    def worst(self, logits: Tensor, expected: Tensor) -> float:
        """The largest difference of log-probabilities."""
        assert logits.dtype == torch.float32 and logits.shape[1] == self.decoder.vocab_size
        assert (logits[:, self.known :] == -torch.inf).all()
        return (logits.log_softmax(-1)[:, : self.known] - expected).abs().max().item()


def load_decoder(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device = CPU,
    **options: Any,
) -> DecoderModel:
    """The text model of a file, all of whose tensors it must use."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    scope = TensorScope(file, device=device, dtype=dtype, options=ScopeOptions(**options))
    decoder = class_for(metadata)(scope, metadata)
    scope.check()
    return decoder


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def check_prompt_and_decoding(pair: Pair) -> None:
    tokens = random_tokens(PROMPT + DECODED, seed=3)
    paged = PagedDecoder(pair.decoder)
    rows = [paged.feed({0: tokens[:PROMPT]}, outputs=[PROMPT - 1])]
    rows += [paged.feed({0: [token]}) for token in tokens[PROMPT:]]
    assert pair.worst(torch.cat(rows), pair.expected(tokens)[PROMPT - 1 :]) <= TOLERANCE


def check_logits(pair: Pair) -> None:
    """Of a prompt, of decoded tokens, and of a long chunk beside a token of another sequence, of
    whose prompt only the last row is computed."""
    one, two = random_tokens(LONG, seed=4), random_tokens(23, seed=5)
    paged = PagedDecoder(pair.decoder)
    ends = [paged.feed({1: two[:22]}, outputs=[21])]
    rows = [paged.feed({0: one[: STEPS.start]})]
    rows += [paged.feed({0: [one[position]]}) for position in STEPS]
    beside = paged.feed({1: two[22:], 0: one[STEPS.stop :]})
    found = torch.cat([*ends, beside[:1], *rows, beside[1:]])
    expected = torch.cat([pair.expected(two)[21:], pair.expected(one)])
    assert pair.worst(found, expected) <= TOLERANCE


def check_long_prompt(pair: Pair) -> None:
    tokens = random_tokens(LONG, seed=6)
    paged = PagedDecoder(pair.decoder)
    rows = [paged.feed({0: tokens[:70]}), paged.feed({0: tokens[70:]})]
    assert pair.worst(torch.cat(rows), pair.expected(tokens)) <= TOLERANCE


def check_rotations_of_cached_keys(pair: Pair) -> None:
    """Rows that see only themselves have keys that differ by their positions alone."""
    rotations = pair.decoder.key_rotations
    if rotations is None:
        return
    tokens, by = random_tokens(24, seed=9), 37
    paged = PagedDecoder(pair.decoder)
    paged.skip(1, by)
    batch = paged.batch({0: tokens, 1: tokens}, outputs=[])
    begin, end = batch.positions.int(), batch.positions.int() + 1
    alone = [replace(plan, visible_begin=begin, visible_end=end) for plan in batch.plans]
    with torch.inference_mode():
        pair.decoder.states(replace(batch, plans=tuple(alone)), paged.cache)
    for layer, rotation in enumerate(rotations):
        keys, moved = (
            paged.keys(slot, layer)[start:][: len(tokens)] for slot, start in ((0, 0), (1, by))
        )
        if rotation is not None:
            assert (moved - keys).abs().max() > 0.01
            moved = rotated(moved, rotation, -by)
        assert torch.allclose(moved, keys, atol=2e-4 * keys.abs().max().item()), layer


def rotated(keys: Tensor, rotation: KeyRotation, by: int) -> Tensor:
    """keys [..., dim] moved by so many positions, with complex numbers."""
    count, first = len(rotation.frequencies), rotation.first
    part = keys[..., first : first + 2 * count].double()
    pairs = part.unflatten(-1, (2, count) if rotation.halves else (count, 2))
    pairs = pairs if not rotation.halves else pairs.transpose(-1, -2)
    turn = torch.polar(torch.ones(count, dtype=torch.float64), rotation.frequencies.double() * by)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if not rotation.halves else turned.transpose(-1, -2)
    whole = keys.clone()
    whole[..., first : first + 2 * count] = turned.flatten(-2).to(keys)
    return whole


def check_memory_that_a_step_declares(pair: Pair) -> None:
    """Of states with the least rows of logits, and of logits alone with the most."""
    decoder = pair.decoder
    for tokens, outputs in ((1, 1), (LONG, 3)):
        check_declared_memory(decoder, tokens, outputs)
    states = torch.ones(LONG, decoder.hidden_size)
    with recorded_memory() as recorded:
        decoder.logits(states)
    peak = states.nbytes + peak_bytes(recorded)
    assert states.nbytes < peak <= decoder.activation_bytes(LONG, LONG)


def check_bits_alone_and_in_a_batch(pair: Pair) -> None:
    """The C kernels give a row the same bits whatever else is in its batch."""
    if library() is None:
        return
    one, two = random_tokens(PROMPT, seed=7), random_tokens(29, seed=8)
    together, apart = PagedDecoder(pair.decoder), PagedDecoder(pair.decoder)
    whole = apart.feed({0: one})
    rows = [apart.feed({1: two[:5]}), apart.feed({1: two[5:]})]
    assert torch.equal(together.feed({1: two, 0: one}), torch.cat([*rows, whole]))


# What every architecture has to pass, by the names of the tests.
CHECKS: dict[str, Callable[[Pair], None]] = {
    "logits": check_logits,
    "memory_that_a_step_declares": check_memory_that_a_step_declares,
    "rotations_of_cached_keys": check_rotations_of_cached_keys,
}


def check_declared_memory(
    decoder: DecoderModel, tokens: int, outputs: int, *, type: CacheType = CacheType.FLOAT32
) -> None:
    """A step allocates no more than it declares, once it has run."""
    paged = PagedDecoder(decoder, pages_per_sequence=-(-tokens // 8), type=type)
    batch = paged.batch({0: random_tokens(tokens, seed=13)}, outputs=range(outputs))
    declared = decoder.activation_bytes(tokens, outputs)

    def peak() -> int:
        with recorded_memory() as recorded:
            decoder.logits(decoder.states(batch, paged.cache))
        return peak_bytes(recorded)

    first = peak()  # with what is made once
    assert first > 0
    assert first <= declared or peak() <= declared


def check_quantized(config: PreTrainedConfig, folder: Path, type: str, **options: Any) -> None:
    """A quantised copy computes what its dequantised weights compute, up to rounding.

    `options`: those of `write_tiny`.
    """
    path = folder / f"{type}.gguf"
    write_tiny(path, config, type=type, **options)
    kept = {tensor.type.name for tensor in GGUFFile.open(path).tensors.values()}
    assert kept - {"F32"}, "nothing is quantised"
    plain = rewrite(path, folder / "plain.gguf", tensors=dict(matrices(path)))
    tokens = random_tokens(PROMPT, seed=14)
    logits = [PagedDecoder(load_decoder(file)).feed({0: tokens}) for file in (path, plain)]
    known = tiny_tokenizer().get_vocab_size()
    one, other = (rows[:, :known].log_softmax(-1) for rows in logits)
    assert (one - other).abs().max() <= QUANTIZED_TOLERANCE

"""Sampling: from logits and each slot's parameters to tokens, for all rows at once on the device.

A row's token depends on its own logits, parameters, seed and position only, to the bit: its own
parameters select its path, equal logits are ordered by token id, and probabilities are summed as
integers, so neither the order of addition nor the width of the tensor matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.int64 import signed
from runtime.kernels.draws import (
    ONE,
    DrawnRows,
    draw_all,
    draw_top,
    drawn_column,
    forbid,
    log_sums,
)
from runtime.kernels.random_numbers import uniforms
from runtime.kernels.slot_tables import slot_entries
from runtime.kernels.token_order import CHUNK, SORT_BLOCK, row_blocks, sorted_tokens, top_tokens
from runtime.worker.logit_biases import BiasedRows, add_biases, bias_spec
from runtime.worker.prompt_scores import TokenScores
from runtime.worker.repetition import RepeatingRows, add_penalties, repetition_spec
from runtime.worker.restrictions import RestrictedRows, forbid_restricted, restriction_spec
from runtime.worker.sampler_chain import COLDEST, XTC_STREAM, ChainRows, chain_spec, odds_of
from runtime.worker.slot_table import LoadedRows, SlotTable, TableColumn, TableSpec

TOP_LIMIT = 256  # a larger top_k takes the path of all tokens

FLOATS = 6  # temperature, top_p, min_p, repeat, presence, frequency
INTS = 5  # seed, top_k, repeat_last_n, counted_from, dropped


class SamplingPath(IntEnum):
    """How a row draws its token; the rows of a step are ordered by path."""

    GREEDY = 0
    TOP = 1  # the top_k largest logits
    SORTED = 2  # all logits in descending order, for top_p
    WHOLE = 3  # all logits in the order of tokens
    CHAIN = 4  # all logits sorted, for the samplers of runtime/worker/sampler_chain.py


def path_of(sampling: SamplingParams, vocab_size: int) -> SamplingPath:
    """The cheapest path for these parameters."""
    if sampling.chained:
        return SamplingPath.CHAIN
    if sampling.temperature <= 0:
        return SamplingPath.GREEDY
    if 0 < sampling.top_k <= TOP_LIMIT:
        return SamplingPath.TOP
    limited = 0 < sampling.top_k < vocab_size
    return SamplingPath.SORTED if limited or sampling.top_p < 1 else SamplingPath.WHOLE


def path_examples() -> tuple[SamplingParams, ...]:
    """Options that draw in each way but CHAIN: kernels choose among powers of two of the most
    likely tokens."""
    widths = (TOP_LIMIT >> halvings for halvings in range(5))
    return (
        SamplingParams(temperature=0),
        *(SamplingParams(top_k=width) for width in widths),
        SamplingParams(top_k=0, top_p=0.5),
        SamplingParams(top_k=0, top_p=1.0),
    )


@dataclass(frozen=True, slots=True)
class LoadedSlots:
    """Slots to fill before a step: the tokens [n] int32 of each, and rows of `Sampler.tables`, None
    where no slot needs one."""

    tokens: tuple[tuple[int, Tensor], ...]
    rows: tuple[LoadedRows | None, ...]


@dataclass(frozen=True, slots=True)
class ProposedTokens:
    """Tokens [n] int32 at `positions` of `slots`, [n] int64 each, that a step reads as if they had
    been sampled. The tokens that it samples at these positions replace them."""

    slots: Tensor
    positions: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Indices [n] int64 of the rows with penalties, which read at most `window` earlier tokens."""

    rows: Tensor
    window: int


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Indices [n] int64 of the rows with log-probabilities, with at most `alternatives` of the most
    likely tokens."""

    rows: Tensor
    alternatives: int


@dataclass(frozen=True, slots=True)
class Draws:
    """How the rows of the logits are sampled.

    slots, positions [rows] int64: the slot of each row's sequence, and the position of the new
    token; rows of one slot have different positions. Rows are ordered by path; `counts` has the
    number of rows of each path. `width`: the largest top_k among the TOP rows.
    """

    slots: Tensor
    positions: Tensor
    counts: tuple[int, ...]
    width: int
    penalised: PenalisedRows | None = None
    scored: ScoredRows | None = None
    biased: BiasedRows | None = None
    repeating: RepeatingRows | None = None
    restricted: RestrictedRows | None = None

    @property
    def from_logits_alone(self) -> bool:
        """Whether each row draws one of its largest logits, without other options."""
        options = self.penalised, self.scored, self.biased, self.repeating, self.restricted
        whole = self.counts[SamplingPath.GREEDY] + self.counts[SamplingPath.TOP] == sum(self.counts)
        return whole and all(rows is None for rows in options)

    @property
    def reads_history(self) -> bool:
        """Whether tokens depend on earlier ones, so that the sizes of windows do on positions."""
        reading = self.penalised, self.repeating, self.restricted
        return any(rows is not None for rows in reading)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The only tokens that `count` rows may draw: rows [count or more] int64, and words [count or
    more, ceil(vocab / 32)] int32, with bit `token % 32` of word `token // 32` for each token."""

    rows: Tensor
    words: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The drawn tokens, on the device.

    tokens [rows] int64; finite [rows] bool: whether the largest logit is finite. scores: of the
    scored rows.
    """

    tokens: Tensor
    finite: Tensor
    scores: TokenScores | None = None


class Sampler:
    """Each slot's tokens and sampling parameters on the device; draws tokens."""

    def __init__(
        self, *, slots: int, context_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self.vocab_size, self.context_tokens = vocab_size, context_tokens
        self._tokens = torch.zeros((slots, context_tokens), dtype=torch.int32, device=device)
        specs = sampler_specs(context_tokens=context_tokens, vocab_size=vocab_size)
        self.tables = tuple(SlotTable(spec, slots=slots, device=device) for spec in specs)
        parameters, *others = self.tables
        self._floats, self._ints = parameters.columns
        self._biases, self._chains, self._repetitions, self._restrictions = others

    @staticmethod
    def state_bytes(*, slots: int, context_tokens: int, vocab_size: int) -> int:
        specs = sampler_specs(context_tokens=context_tokens, vocab_size=vocab_size)
        return slots * (4 * context_tokens + sum(spec.row_bytes for spec in specs))

    @staticmethod
    def workspace_bytes(*, rows: int, context_tokens: int, vocab_size: int) -> int:
        """Upper bound of what `sample` allocates: sorting, raw logits for scores, penalties."""
        sorting = 128 * min(rows, SORT_BLOCK) * vocab_size
        scores = 8 * rows * vocab_size
        penalties = rows * (96 * context_tokens + 12 * vocab_size)
        candidates = 64 * rows * min(TOP_LIMIT * CHUNK, vocab_size + CHUNK)
        thresholds = rows * (5 * vocab_size + 64 * 1024)
        masks = 12 * rows * vocab_size + 3 * rows * restriction_spec(vocab_size).row_bytes
        tables = 3 * rows * bias_spec().row_bytes
        return max(sorting, penalties, candidates, thresholds, masks, tables) + scores

    def load(self, loaded: LoadedSlots) -> None:
        """Sequences enter slots: their tokens from position 0, and their parameters."""
        for slot, tokens in loaded.tokens:
            self._tokens[slot, : tokens.shape[0]] = tokens
        for table, rows in zip(self.tables, loaded.rows, strict=True):
            if rows is not None:
                table.load(rows)

    def propose(self, proposed: ProposedTokens) -> None:
        self._tokens[proposed.slots, proposed.positions] = proposed.tokens

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """int64 [n]: tokens of prompts, or sampled, at positions int64 [n] of slots int32 [n]."""
        return slot_entries(self._tokens, slots, positions)

    def sample(self, logits: Tensor, draws: Draws, masks: TokenMasks | None = None) -> Drawn:
        """logits [rows, vocab] float32, ordered as `draws`; overwritten.

        The drawn tokens are also appended to the tokens of their slots. Log-probabilities are those
        of all tokens, whatever `masks` allow.
        """
        slots, positions = draws.slots, draws.positions
        raw = None if draws.scored is None else logits[draws.scored.rows]
        if draws.biased is not None:
            add_biases(self._biases, logits, draws.biased, slots, positions)
        if draws.penalised is not None:
            self._penalise(logits, draws, draws.penalised)
        if draws.repeating is not None:
            add_penalties(
                self._repetitions, logits, draws.repeating, slots, positions, self._tokens
            )
        if draws.restricted is not None:
            forbid_restricted(
                self._restrictions, logits, draws.restricted, slots, positions, self._tokens
            )
        if masks is not None:
            forbid(logits, masks.rows, masks.words, masks.count)
        tokens, finite = self._draw(logits, draws)
        scores = None
        if draws.scored is not None and raw is not None:
            scores = _score(raw, tokens[draws.scored.rows], draws.scored.alternatives)
        return Drawn(tokens, finite, scores)

    def score(
        self, logits: Tensor, slots: Tensor, positions: Tensor, alternatives: int
    ) -> TokenScores:
        """Scores of the tokens at positions [rows] int64 of slots [rows] int32, by the raw logits
        [rows, vocab] float32, and of the most likely ones."""
        return _score(logits, self.tokens_at(slots, positions), alternatives)

    def _draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Tokens [rows] int64, appended to those of their slots, and `Drawn.finite`."""
        counts = draws.counts
        rows = DrawnRows(
            logits, draws.slots, draws.positions, self._floats, self._ints, self._tokens
        )
        top = counts[SamplingPath.GREEDY] + counts[SamplingPath.TOP]
        unchained = top + counts[SamplingPath.SORTED] + counts[SamplingPath.WHOLE]

        parts = []
        if top or not len(logits):
            greedy = counts[SamplingPath.GREEDY]
            parts.append(draw_top(rows.part(0, top), greedy=greedy, width=draws.width))
        if unchained > top:
            parts.append(draw_all(rows.part(top, unchained), ordered=counts[SamplingPath.SORTED]))
        for block in row_blocks(unchained, len(logits)):
            parts.append(self._draw_chain(rows.part(*block)))
        if len(parts) == 1:
            return parts[0]
        tokens, finite = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return tokens, finite

    def _draw_chain(self, drawn: DrawnRows) -> tuple[Tensor, Tensor]:
        """As `draw_all`, for the rows of path CHAIN, with the weights of `odds_of`."""
        floats, ints = self._floats[drawn.slots], self._ints[drawn.slots]
        numbers = drawn.positions + ints[:, 4]
        rows = ChainRows(
            temperature=floats[:, 0:1],
            top_p=floats[:, 1:2],
            min_p=floats[:, 2:3],
            top_k=ints[:, 1:2],
            chain=self._chains.columns[0][drawn.slots],
            chance=uniforms(ints[:, 0] ^ XTC_STREAM, numbers)[:, None],
        )
        values, ids = sorted_tokens(drawn.logits)
        sums = (odds_of(values, rows) * ONE).long().cumsum(dim=1)
        column = drawn_column(sums, sums[:, -1], uniforms(ints[:, 0], numbers))
        return drawn.write(values[:, 0], ids.gather(1, column)[:, 0])

    def _penalise(self, logits: Tensor, draws: Draws, penalised: PenalisedRows) -> None:
        """Repeat, frequency and presence penalties in place, as llama.cpp defines them.

        The repeat penalty applies to every token in the window, the other two only to tokens from
        `counted_from` on.
        """
        rows = penalised.rows
        slots, ends = draws.slots[rows], draws.positions[rows]
        repeat, presence, frequency = (self._floats[slots, i][:, None] for i in (3, 4, 5))
        back = torch.arange(1, penalised.window + 1, device=logits.device)
        places = ends[:, None] - back
        last_n, begin = (self._ints[slots, i][:, None] for i in (2, 3))
        seen = (places >= 0) & (back <= last_n)
        counted = seen & (places >= begin)
        ids = self._tokens[slots[:, None], places.clamp_(min=0)].long()
        ordered = torch.where(counted, ids, self.vocab_size).sort(dim=1).values
        # Places outside the window repeat the newest token, which is always inside: writing one
        # cell several times with the same value is harmless.
        ids = torch.where(seen, ids, ids[:, :1])
        counts = torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
        cells = (rows[:, None], ids)
        values = logits[cells]
        lower = torch.where(values > 0, values / repeat, values * repeat)
        logits[cells] = lower - (counts * frequency + (counts > 0) * presence)


def sampler_specs(*, context_tokens: int, vocab_size: int) -> tuple[TableSpec, ...]:
    """Of `Sampler.tables`, in their order."""
    return (
        parameter_spec(context_tokens=context_tokens, vocab_size=vocab_size),
        bias_spec(),
        chain_spec(),
        repetition_spec(context_tokens=context_tokens, vocab_size=vocab_size),
        restriction_spec(vocab_size),
    )


def parameter_spec(*, context_tokens: int, vocab_size: int) -> TableSpec:
    """The floats and integers that all requests have."""
    columns = TableColumn((FLOATS,), torch.float32), TableColumn((INTS,), torch.int64)
    rows = partial(_parameter_rows, context_tokens=context_tokens, vocab_size=vocab_size)
    return TableSpec(columns, used_by=lambda _: True, rows=rows)


def _parameter_rows(
    loads: Sequence[SlotLoad], *, context_tokens: int, vocab_size: int
) -> tuple[list[list[float]], list[list[int]]]:
    sampling = [load.sampling for load in loads]
    floats = [
        [
            max(s.temperature, COLDEST),
            min(max(s.top_p, 0.0), 1.0),
            min(max(s.min_p, 0.0), 1.0),
            s.repeat_penalty,
            s.presence_penalty,
            s.frequency_penalty,
        ]
        for s in sampling
    ]
    ints = [
        [
            signed(s.seed),
            _top_k(s, vocab_size),
            context_tokens if s.repeat_last_n is None else min(s.repeat_last_n, context_tokens),
            s.counted_from,
            s.dropped,
        ]
        for s in sampling
    ]
    return floats, ints


def _top_k(sampling: SamplingParams, vocab_size: int) -> int:
    """The number of tokens that a row chooses from."""
    if path_of(sampling, vocab_size) is SamplingPath.GREEDY:
        return 1
    return sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size


def _score(raw: Tensor, tokens: Tensor, alternatives: int) -> TokenScores:
    """Of tokens [rows] int64 by logits [rows, vocab]."""
    normaliser = log_sums(raw)
    logprobs = (raw.gather(1, tokens[:, None]) - normaliser)[:, 0]
    if alternatives == 0:
        ids, values = tokens.new_zeros(len(tokens), 0), logprobs.new_zeros(len(tokens), 0)
        return TokenScores(logprobs, ids, values)
    values, ids = top_tokens(raw, alternatives)
    return TokenScores(logprobs, ids, values - normaliser)

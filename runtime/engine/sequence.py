"""A request in the engine, from its arrival to its end."""

from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.context_shift import ContextCut, cut_of
from runtime.engine.request import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    LateMask,
    Matcher,
    Outcome,
    Pooled,
    Sampled,
    SamplingParams,
    Scored,
)
from runtime.kv.cache_kinds import images_within
from runtime.kv.page_group import PageKey

NO_ROWS = range(0)


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A request from arrival to its end. Only the scheduler changes it."""

    request: GenerationRequest
    # Prompt and answer, as far as the host knows them, without tokens dropped from the context.
    tokens: list[int]
    # The cut of a full context whose other pages move; None: they are computed again.
    moving_cut: ContextCut | None = None
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    launched: int = 0  # positions in launched steps
    confirmed: int = 0  # positions in retired steps
    pending: int = 0  # tokens sampled on the device and not yet read back
    epoch: int = 0  # incremented by preemptions and shifts; marks earlier results as stale
    cached: int = 0  # prompt tokens found in the prefix cache at first admission
    prompt_logprobs: list[Sampled] = field(default_factory=list)  # not yet delivered
    scored: int = 0  # positions whose rows have scored the next token of the prompt
    page_keys: list[PageKey] = field(default_factory=list)
    late_mask: LateMask | None = None  # the unfinished mask of its next token
    proposed: tuple[int, ...] = ()  # proposed next tokens, for the next plan
    drafted: bool = False  # whether a draft model made the last proposal
    proposing: int = 0  # rows of proposed tokens in launched steps
    waits_to_propose: bool = False  # skips steps until the host knows its last token
    awaited: tuple[bytes, ...] | None = None  # images of its first chunk; None: not yet known
    prefix_hit: int | None = None  # tokens found in the prefix cache when last looked up
    cut_tokens: list[int] = field(default_factory=list)  # tokens that `moving_cut` has dropped
    spans: tuple[ImageSpan, ...] = field(init=False)  # those in the current context
    sampling: SamplingParams = field(init=False)  # with positions in the current context
    cache_salt: bytes = field(init=False)
    inserted: tuple[ImageSpan, ...] = field(init=False)  # those whose features replace embeddings
    # False for prompts whose rows must all be computed (pooling, scores) and after a moving shift.
    shares_pages: bool = field(init=False)
    matcher: Matcher | None = field(init=False)  # None without a grammar
    whole_tokens: int = field(init=False)  # number of `tokens` at the end of the longest answer
    # Limit of `length`; no step computes the last position.
    most_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.sampling, self.cache_salt = self.request.sampling, self.request.cache_salt
        self._set_spans(self.request.spans)
        self.shares_pages = self.request.pooling is None and self.request.prompt_logprobs is None
        self._set_most_tokens()
        grammar = self.request.grammar
        self.matcher = None if grammar is None else grammar.matcher()
        if self.matcher is not None:
            for token in self.tokens[len(self.request.prompt) :]:
                self.matcher.accept(token)
        self.shares_pages &= self.moving_cut is None or len(self.tokens) < self.most_tokens
        while self.moving_cut is None and self.fills_context:  # repeat shifts of another replica
            self.shift()

    @property
    def answered(self) -> int:
        """Tokens of the answer, as far as the host knows them."""
        return self.sampling.dropped + len(self.tokens) - len(self.request.prompt)

    @property
    def fills_context(self) -> bool:
        """Whether tokens must be dropped before it can continue. With a `moving_cut`, False until
        all positions are computed, since only computed pages can move."""
        shift = self.request.shift
        return (
            shift is not None
            and self.state is not SequenceState.FINISHED
            and len(self.tokens) >= shift.context_tokens
            and (self.moving_cut is None or self.confirmed == shift.context_tokens - 1)
            and self.answered < self.request.stop.max_tokens
        )

    def shift(self) -> None:
        """Drop tokens of a full context. The sequence must have no slot and no pages, or its pages
        must have moved already."""
        assert self.request.shift is not None
        cut = self.moving_cut
        if cut is None:
            assert self.slot is None
            cut = cut_of(self.request.shift, len(self.request.prompt), self.spans)
            self.page_keys.clear()
        else:
            assert self.launched == self.confirmed
            self.cut_tokens += self.tokens[cut.begin : cut.end]
            self.launched = self.confirmed = self.confirmed - cut.count
            self.shares_pages = False
            self.epoch += 1
        del self.tokens[cut.begin : cut.end]
        self.sampling = cut.sampling(self.sampling)
        self._set_spans(cut.spans(self.spans))
        self._set_most_tokens()

    def restart(self) -> None:
        """The sequence has lost its slot and pages. Moved pages depend on the dropped tokens, so
        these are restored, and everything is computed again with the same shifts."""
        self.launched = self.confirmed = 0
        self.epoch += 1
        self.awaited = self.prefix_hit = None
        if self.cut_tokens:
            assert self.moving_cut is not None
            begin = self.moving_cut.begin
            self.tokens[begin:begin] = self.cut_tokens
            self.cut_tokens = []
            self.sampling = self.request.sampling
            self._set_most_tokens()

    def _set_spans(self, spans: tuple[ImageSpan, ...]) -> None:
        images = {image.digest for image in self.request.images}
        self.spans = spans
        self.inserted = tuple(s for s in spans if s.digest in images and not s.cross_rows)

    def _set_most_tokens(self) -> None:
        request = self.request
        most = max(1, request.stop.max_tokens)
        self.whole_tokens = len(request.prompt) + most - self.sampling.dropped
        context = self.whole_tokens if request.shift is None else request.shift.context_tokens
        self.most_tokens = min(self.whole_tokens, context)

    @property
    def resumes(self) -> bool:
        """Whether it has had a slot before, here or on another replica."""
        state = self.request.resume
        return self.epoch > 0 or (state is not None and state.had_turn)

    @property
    def length(self) -> int:
        """Number of tokens, including those that only the device knows."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Number of tokens that are in no launched step."""
        return len(self.tokens) + self.pending - self.launched  # read for each sequence and step

    def scores_in(self, start: int, end: int) -> range:
        """The positions in [start, end) whose rows must score the next token of the prompt."""
        if self.request.prompt_logprobs is None:
            return NO_ROWS
        return range(max(start, self.scored), min(end, len(self.request.prompt) - 1))

    def add_scores(self, positions: range, logprobs: tuple[Sampled, ...]) -> None:
        """Add the scores of a chunk, except for positions that are scored already."""
        self.prompt_logprobs += logprobs[max(0, self.scored - positions.start) :]
        self.scored = max(self.scored, positions.stop)

    def take_scores(self) -> tuple[Sampled, ...]:
        """The scores that were not yet taken."""
        if not self.prompt_logprobs:
            return ()
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    @property
    def waits_for_token(self) -> bool:
        """Whether its next step depends on a token that only the device knows."""
        if not self.pending:
            return False
        if self.matcher is not None and self.matcher.free <= self.pending:
            return True
        return self.proposing > 0 or self.waits_to_propose

    @property
    def needs_masks(self) -> bool:
        """Whether a token that its launched steps sample needs a mask."""
        return self.matcher is not None and self.matcher.free < self.pending + self.proposing

    @property
    def may_propose(self) -> bool:
        """Whether its next step computes only its last token, with no late mask."""
        return self.remaining == 1 and not self.proposing and self.late_mask is None

    def propose(self, tokens: tuple[int, ...], *, drafted: bool = False) -> None:
        """Set the proposal for the next plan; the sequence then no longer waits to propose."""
        self.proposed, self.waits_to_propose = tokens, False
        if tokens:
            self.drafted = drafted

    def acceptable(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The leading tokens that its grammar accepts; all of them while that is not known."""
        if self.matcher is None or self.pending:
            return tokens
        return tokens[: self.matcher.acceptable(tokens)]

    def append(self, sampled: Sampled) -> None:
        self.tokens.append(sampled.token)
        self.late_mask = None
        if self.matcher is not None:
            self.matcher.accept(sampled.token)

    def finish_reason(self, outcome: Outcome) -> FinishReason | None:
        """Why it ends with this outcome; None if it continues."""
        if isinstance(outcome, Sampled):
            ended = outcome.token in self.request.stop.end_tokens
            full = len(self.tokens) >= self.whole_tokens
            return FinishReason.STOP if ended else FinishReason.LENGTH if full else None
        if isinstance(outcome, Pooled):
            return FinishReason.STOP
        return FinishReason.LENGTH if isinstance(outcome, Scored) else FinishReason.FAILED

    def may_end_at(self, position: int) -> bool:
        """Whether a step may end before `position`: not inside an image that must stay whole."""
        around = images_within(self.spans, position, position + 1)
        return not any(span.whole and span.start < position for span in around)

    @property
    def least_tokens(self) -> int:
        """Length of its shortest possible chunk: one token, or an image that must stay whole."""
        start = self.launched
        here = images_within(self.spans, start, start + 1)
        return next((s.end - start for s in here if s.whole), 1)

    def cut_to_whole_images(self, count: int) -> int:
        """`count` tokens from `launched` on, fewer if the step would split a whole image."""
        end = self.launched + count
        for span in images_within(self.spans, end, end + 1):
            if span.whole and span.start < end:
                return max(0, span.start - self.launched)
        return count

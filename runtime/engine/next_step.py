"""The plan of the next step, under construction."""

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk, PageWrite, SlotLoad
from runtime.kv.cache_kinds import images_within
from runtime.kv.page_group import KeyShift
from runtime.kv.page_shift import MovedPages

# Whether the features of the image with this digest are available.
FeaturesReady = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class ImageNeed:
    """A sequence needs the features of an image, in the step just planned or in one of the next."""

    sequence: Sequence
    digest: bytes


@dataclass(slots=True)
class NextStep:
    """A plan under construction: its remaining budgets and its contents."""

    budget: int  # remaining rows
    prompt_rows: int  # how many of them may compute prompts
    stream_rows: int  # how many of them the running streams need that follow, one each
    image_rows: int  # remaining image rows
    ready: FeaturesReady
    waits_for_masks: bool = False
    reserved_rows: int = 0  # how many of the prompts' rows long prompts leave to short ones
    reserved_for: int = 0  # most remaining tokens of a short prompt
    has_looked_up: bool = False  # the cached prefix of a prompt that waits
    chunks: list[Chunk] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    slot_loads: list[SlotLoad] = field(default_factory=list)
    proposals: list[Chunk] = field(default_factory=list)
    key_shifts: list[KeyShift] = field(default_factory=list)
    out_of_pages: bool = False
    lacks_mask: bool = False
    used: list[ImageNeed] = field(default_factory=list)  # images of its chunks
    ahead: list[ImageNeed] = field(default_factory=list)  # images of possible later chunks

    def sizes(self, sequence: Sequence) -> tuple[int, ...]:
        """What limits the sequence's next chunk, if all features are available."""
        return self.budget, self.prompt_rows, -self.reserved_rows, self.image_rows, sequence.length

    def gives_way(self, remaining: int) -> bool:
        """Whether a prompt with `remaining` tokens to compute leaves the reserved rows to short
        prompts."""
        return self.reserved_rows > 0 and remaining > self.reserved_for

    def rows_for(self, remaining: int) -> int:
        """How many of the step's rows a prompt with `remaining` tokens to compute may have."""
        rows = min(self.budget - self.stream_rows, self.prompt_rows)
        return max(0, rows - self.reserved_rows) if self.gives_way(remaining) else rows

    def rows_beside(self, count: int) -> int:
        """How many rows the proposals of a stream may have beside its `count` other rows."""
        return max(0, self.budget - self.stream_rows - self.reserved_rows - count)

    def take(self, count: int, *, remaining: int) -> None:
        """Deduct from the budgets `count` rows of a sequence with `remaining` tokens to compute."""
        self.budget -= count
        if remaining > 1:
            self.prompt_rows = max(0, self.prompt_rows - count)
            left = self.reserved_rows - (0 if self.gives_way(remaining) else count)
            self.reserved_rows = max(0, min(left, self.prompt_rows))

    def lacks_features(self, sequence: Sequence, needed: tuple[bytes, ...]) -> bool:
        """Whether features are missing. A first chunk needs the first image only, but all images if
        they are for cross-attention."""
        return not all(map(self.ready, needed[:1] if sequence.inserted else needed))

    def cut_to_features(self, sequence: Sequence, count: int) -> int:
        """`count` tokens from `launched` on, fewer if features would be missing."""
        start, end = sequence.launched, sequence.launched + count
        for span in images_within(sequence.inserted, start, end):
            if not self.ready(span.digest):
                return max(0, span.start - start)
        return count

    def move(self, sequence: Sequence, moved: MovedPages) -> None:
        """Add the page moves of a shifted sequence, and a reload of its tokens into its slot."""
        assert sequence.slot is not None
        slot = sequence.slot
        self.page_writes += [PageWrite(group, slot, *page) for group, *page in moved.pages]
        self.key_shifts += moved.key_shifts
        self.slot_loads.append(slot_load(sequence, slot))


def slot_load(sequence: Sequence, slot: int) -> SlotLoad:
    known = tuple(sequence.tokens[: sequence.most_tokens])
    return SlotLoad(slot, known, sequence.sampling)

"""Long runs of digits are cut where pre-tokenizers that group digits from the right split them."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model_zoo.tokenizers.byte_level import splitter
from model_zoo.tokenizers.digit_runs import DigitRuns
from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import byte_level_metadata

NAMES = ["tiny_aya", "superbpe", "afmoe"]
RUNS = st.integers(1, 140).map(lambda count: ("0123456789" * 14)[:count])
OTHERS = ["x", " ", "  ", "_", ".", "é", "e\u0301", "٣" * 40, "²" * 40, "²", "\n", " \n", "\n "]
TEXTS = st.lists(RUNS | st.sampled_from(OTHERS)).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
@example("  " + 31 * "1" + "x")
def test_pieces_are_split_as_the_whole_text(name, text) -> None:
    pre = PRE_TOKENIZERS[name]
    assert pre.from_right is not None
    if pre.from_right == r"\d":
        text = text.replace("²", "")  # may be in one piece with the digits beside it
    native = splitter(pre)
    whole = [piece for piece, _ in native.pre_tokenize_str(text)]
    pieces = DigitRuns(native, pre.from_right).pieces(text)
    parts = [piece for part in pieces for piece, _ in native.pre_tokenize_str(part)]
    assert "".join(pieces) == text
    assert parts == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["", "x"])
def test_a_long_run_takes_linear_time(name, end) -> None:
    metadata = byte_level_metadata({}, pre=name)
    tokenizer = load_tokenizer(metadata, architecture="cohere2")
    text = "1" * 100_000 + end
    began = time.process_time()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - began < 20  # whole, it takes at least a minute

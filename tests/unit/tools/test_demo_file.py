"""Continued training starts from the weights and the tokens of a file."""

from itertools import islice

import pytest
import torch

from tools.demo_file import read_model
from tools.demo_model import new_model, render_with_pictures, write_vision_model
from tools.demo_picture_dialogues import training_dialogues


@pytest.fixture(scope="module")
def written(tokenizer, tmp_path_factory):
    """A model and its file."""
    torch.manual_seed(0)
    model = new_model(tokenizer)
    path = tmp_path_factory.mktemp("demo") / "seeing.gguf"
    write_vision_model(path, model, tokenizer)
    return model, path


def test_weights_are_read_back_with_the_precision_of_q8_0(written):
    model, path = written
    read, _ = read_model(path)
    expected = model.state_dict()
    for name, weight in read.state_dict().items():
        # Q8_0 rounds to 1/127 of the largest weight of a block, half a step at most.
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=largest / 127)


def test_the_tokenizer_is_read_back(written, tokenizer):
    _, path = written
    _, read = read_model(path)
    for dialogue in islice(training_dialogues(9), 50):
        text = render_with_pictures(dialogue, reply=True)
        assert read.encode(text).ids == tokenizer.encode(text).ids

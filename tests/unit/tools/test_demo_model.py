"""The demo model: training and serving use the same prompts, and the file is small."""

import json
from itertools import islice

import pytest
import torch

from model_zoo.chat.formats.events import CallArguments, CallBegin, Text
from model_zoo.registry import load
from tools import demo_tools
from tools.demo_model import (
    IMAGE_SIDE,
    PLACE,
    ROWS_PER_IMAGE,
    UNSCORED,
    batch,
    new_model,
    render,
    render_with_pictures,
    write_vision_model,
)
from tools.demo_picture_dialogues import held_out, training_dialogues, with_text_first
from tools.demo_report import as_sent
from tools.demo_tools import CALL_BEGIN, CALL_END

LARGEST_FILE = 12_000_000


@pytest.fixture(scope="module")
def file(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("demo") / "seeing.gguf"
    write_vision_model(path, new_model(tokenizer), tokenizer)
    return path


def test_the_file_is_small_enough(file):
    assert file.stat().st_size <= LARGEST_FILE


@pytest.mark.parametrize("order", [list, with_text_first], ids=["image-first", "text-first"])
def test_served_prompts_are_those_of_training(file, tokenizer, order):
    model = load(file, device=torch.device("cpu"), dtype=torch.float32)
    place = tokenizer.token_to_id(PLACE)
    for question in held_out(5, per_skill=2):
        messages = order(question.messages)
        served = model.prepare([as_sent(message, IMAGE_SIDE) for message in messages])
        trained = tokenizer.encode(render_with_pictures(messages, reply=True)).ids
        assert len(served.tokens) == len(trained)
        pairs = zip(served.tokens, trained, strict=True)
        assert all(one == other for one, other in pairs if other != place)
        shown = batch([messages], tokenizer).get("pixel_values")
        assert len(served.images) == (0 if shown is None else len(shown))
        for image, pixels in zip(served.images, () if shown is None else shown, strict=True):
            assert image.rows == ROWS_PER_IMAGE
            torch.testing.assert_close(image.pixels.float().reshape(pixels.shape), pixels)


def test_served_prompts_with_tools_are_those_of_training(file, tokenizer):
    model = load(file, device=torch.device("cpu"), dtype=torch.float32)
    for question in demo_tools.held_out(5, per_skill=4):
        messages = [as_sent(message, IMAGE_SIDE) for message in question.messages]
        served = model.prepare(messages, tools=question.tools)
        text = render(demo_tools.as_text(question.messages, question.tools), reply=True)
        assert list(served.tokens) == tokenizer.encode(text).ids


def test_a_call_of_training_is_parsed_as_a_call(file):
    reply = load(file, device=torch.device("cpu"), dtype=torch.float32).reply_format
    question = demo_tools.held_out(5, per_skill=1)[0]
    function = question.tools[0]["function"]
    parser = reply.parser({function["name"]: function["parameters"]}, thinks=False)
    events = parser.feed(question.answer) + parser.finish()
    [begin] = [event for event in events if isinstance(event, CallBegin)]
    arguments = "".join(event.json for event in events if isinstance(event, CallArguments))
    sent = json.loads(question.answer.removeprefix(CALL_BEGIN).removesuffix(CALL_END))
    assert begin.name == sent["name"]
    assert json.loads(arguments) == sent["arguments"]
    assert not any(isinstance(event, Text) for event in events)


def test_only_replies_are_scored(tokenizer):
    dialogues = list(islice(training_dialogues(2), 12))
    rows = batch(dialogues, tokenizer)
    for labels, ids, messages in zip(rows["labels"], rows["input_ids"], dialogues, strict=True):
        scored = labels != UNSCORED
        assert torch.equal(labels[scored], ids[scored])
        replies = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        said = tokenizer.decode(ids[scored].tolist(), skip_special_tokens=False)
        assert said == "".join(f"{reply}<|im_end|>" for reply in replies)


def test_places_of_images_are_marked_and_padding_is_not_attended(tokenizer):
    dialogues = list(islice(training_dialogues(2), 12))
    rows = batch(dialogues, tokenizer)
    images = sum(len(turn.get("pictures", ())) for messages in dialogues for turn in messages)
    assert rows["token_type_ids"].sum() == images * ROWS_PER_IMAGE
    assert rows["pixel_values"].shape == (images, 3, IMAGE_SIDE, IMAGE_SIDE)
    lengths = [
        len(tokenizer.encode(render_with_pictures(messages, reply=False)).ids)
        for messages in dialogues
    ]
    assert rows["attention_mask"].sum(dim=1).tolist() == lengths


def test_every_weight_learns_from_one_step(tokenizer):
    torch.manual_seed(0)
    model = new_model(tokenizer)
    rows = batch(list(islice(training_dialogues(3), 2)), tokenizer)
    assert "pixel_values" in rows
    model(**rows).loss.backward()
    still = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.abs().max() > 0
    ]
    assert still == []

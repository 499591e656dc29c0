"""Questions about pictures have the answer that the pixels give, and held-out ones are new."""

import io
import re
from collections import Counter
from itertools import islice

import pytest
from PIL import Image

from tests.unit.tools.looking import blobs
from tools.demo_picture_dialogues import (
    NO_PICTURE,
    SHARE,
    as_requests,
    held_out,
    is_right,
    training_dialogues,
)
from tools.demo_picture_questions import SKILLS
from tools.demo_pictures import PLACES

SIZE = 256  # enough to tell the outlines of small shapes apart


@pytest.fixture(scope="module")
def questions():
    return held_out(3, per_skill=60)


@pytest.fixture(scope="module")
def dialogues():
    return list(islice(training_dialogues(3), 4000))


def pictures_of(messages):
    return [picture for message in messages for picture in message.get("pictures", ())]


def seen_in(question):
    return [blobs(picture, SIZE) for picture in pictures_of(question.messages)]


def words_of(question):
    return question.casefold().rstrip("?.! ")


def of(questions, *skills):
    return [question for question in questions if question.skill in skills]


def counted(blobs_seen, words):
    """How many of these "red stars", "crosses" or "shapes" can be seen."""
    colour, _, kind = words.rpartition(" ")
    kind = re.sub("(?<=ss)es$|s$", "", kind) if kind != "cross" else kind
    return sum(colour in ("", blob.colour) and kind in ("shape", blob.shape) for blob in blobs_seen)


def test_counts_are_those_of_the_pixels(questions):
    for question in of(questions, "counting"):
        number, words = re.fullmatch(r"There (?:is|are) (\w+) (.+)\.", question.answer).groups()
        [seen] = seen_in(question)
        assert counted(seen, words) == int(number.replace("no", "0")), question


def test_single_items_have_the_colour_the_place_and_the_shape_of_the_pixels(questions):
    checked = Counter()
    for question in of(questions, "colour", "place", "shape"):
        [seen] = seen_in(question)
        if len(seen) == 1 and not pictures_of(question.messages)[0].number:
            [blob] = seen
            expected = {
                "colour": f"It is {blob.colour}.",
                "place": f"It is {PLACES[blob.place]}.",
                "shape": f"It is a {blob.shape}.",
            }
            assert question.answer == expected[question.skill]
            checked[question.skill] += 1
    assert len(checked) == 3


def test_a_place_asked_about_holds_exactly_what_the_answer_says(questions):
    columns = {"on the left": 0, "on the right": 2}
    rows = {"at the top": 0, "at the bottom": 2}
    for question in of(questions, "region"):
        if pictures_of(question.messages)[0].number:
            continue
        what, place = re.fullmatch(r"(.+?) is ((?:at|on|in) .+)\.", question.answer).groups()
        [seen] = seen_in(question)
        there = [
            f"{blob.colour} {blob.shape}"
            for blob in seen
            if place == PLACES[blob.place]
            or columns.get(place) == blob.place % 3
            or rows.get(place) == blob.place // 3
        ]
        assert there == ([] if what == "Nothing" else [what.split(" ", 1)[1]]), question


def test_descriptions_name_everything_in_reading_order(questions):
    for question in of(questions, "description"):
        if pictures_of(question.messages)[0].number:
            continue
        [seen] = seen_in(question)
        told = re.split(", | and ", question.answer.removeprefix("I see ").rstrip("."))
        placed = [f"{blob.colour} {blob.shape} {PLACES[blob.place]}" for blob in seen]
        plain = [f"{blob.colour} {blob.shape}" for blob in seen]
        expected = placed if len(seen) <= 3 else plain
        assert [each.removeprefix("an ").removeprefix("a ") for each in told] == expected


def test_yes_and_no_are_what_the_pixels_say(questions):
    for question in of(questions, "existence"):
        yes, words = re.fullmatch(r"(Yes|No), there is (?:an?|no) (.+)\.", question.answer).groups()
        [seen] = seen_in(question)
        words = "cross" if words == "cross" else words
        assert (counted(seen, words) > 0) == (yes == "Yes"), question


def test_without_a_picture_none_is_seen(questions):
    asked = of(questions, "no picture")
    assert {question.answer for question in asked} == {NO_PICTURE}
    assert not any(pictures_of(question.messages) for question in asked)


def test_equal_seeds_make_equal_dialogues_and_others_do_not():
    assert held_out(7, per_skill=3) == held_out(7, per_skill=3)
    assert held_out(7, per_skill=3) != held_out(8, per_skill=3)
    first, again, other = (list(islice(training_dialogues(seed), 20)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_no_held_out_item_or_sentence_is_met_in_training(questions, dialogues):
    trained_items = {
        item.facts
        for messages in dialogues
        for picture in pictures_of(messages)
        for item in picture.items
    }
    trained_words = {
        words_of(turn["content"])
        for messages in dialogues
        for turn in messages
        if turn["role"] == "user"
    }
    for question in questions:
        for picture in pictures_of(question.messages):
            assert not {item.facts for item in picture.items} & trained_items
        assert words_of(question.messages[-1]["content"]) not in trained_words


def test_a_training_dialogue_ends_in_a_reply_and_turns_alternate(dialogues):
    for messages in dialogues:
        roles = [turn["role"] for turn in messages if turn["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(pictures_of(messages)) <= 2


def test_every_skill_is_held_out_in_many_words_with_many_answers(questions):
    assert list(dict.fromkeys(question.skill for question in questions)) == list(SHARE)
    for skill in SHARE:
        asked = of(questions, skill)
        assert len(asked) == 60
        assert len({question.messages[-1]["content"] for question in asked}) >= 15, skill
        if skill == "no picture":
            continue
        answers = Counter(question.answer for question in asked)
        assert answers.most_common(1)[0][1] <= 42, (skill, answers)


def test_training_meets_every_skill_and_pictures_in_most_dialogues(dialogues):
    shown = [len(pictures_of(messages)) for messages in dialogues]
    assert Counter(shown).keys() == {0, 1, 2}
    assert shown.count(0) < 0.1 * len(shown)
    texts = {turn["content"] for messages in dialogues for turn in messages}
    assert any("opposite of" in text for text in texts)
    assert NO_PICTURE in texts


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("It is red.", "red", True),
        ("There are 3 shapes.", "I count three shapes!", True),
        ("There are 3 crosses.", "3 crosses", True),
        ("A red circle is on the left.", "There is a red circle on the left.", True),
        ("A red circle is on the left.", "A red square is on the left.", False),
        ("Yes, it is left of the star.", "Yes, it is right of the star.", False),
        ("There are 3 circles.", "There are 4 circles.", False),
        ("There are no stars.", "There is 1 star.", False),
        ("It is at the top left.", "It is at the top.", False),
        (NO_PICTURE, "I see a red circle in the middle.", False),
        ("It is red.", "", False),
    ],
)
def test_a_reply_is_right_when_it_says_the_same(answer, given, right):
    assert is_right(answer, given) == right


def test_different_answers_to_one_skill_never_pass_for_each_other(questions):
    for skill in [*SKILLS, "no picture"]:
        answers = {question.answer for question in of(questions, skill)}
        for one in answers:
            assert [other for other in answers if is_right(one, other)] == [one]


def test_requests_carry_the_pictures_as_png_of_the_size(questions):
    question = of(questions, "one of two")[0]
    requests = as_requests(question.messages, size=80)
    images = [data for request in requests for data in request.get("images", ())]
    assert [Image.open(io.BytesIO(data)).size for data in images] == [(80, 80)] * 2
    assert [request["content"] for request in requests] == [
        turn["content"] for turn in question.messages
    ]
    assert all(request.keys() <= {"role", "content", "images"} for request in requests)

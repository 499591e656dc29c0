"""Answers about pictures agree with the pixels, and held-out questions are not in training."""

import io
import re
from collections import Counter
from itertools import islice

import pytest
from PIL import Image

from tests.unit.tools.pixel_blobs import blobs
from tools.demo_picture_dialogues import (
    NO_PICTURE,
    SHARE,
    as_requests,
    held_out,
    is_right,
    training_dialogues,
    with_text_first,
)
from tools.demo_picture_questions import SKILLS
from tools.demo_pictures import PLACES

SIZE = 256  # enough to tell the outlines of small shapes apart

# What the first is to the second, in rows and columns.
RELATIONS = {
    (" left of", "further left"): lambda one, two: one.place % 3 < two.place % 3,
    (" right of", "further right"): lambda one, two: one.place % 3 > two.place % 3,
    (" above", " over", "higher"): lambda one, two: one.place // 3 < two.place // 3,
    (" below", " under", "lower"): lambda one, two: one.place // 3 > two.place // 3,
}


@pytest.fixture(scope="module")
def questions():
    return held_out(3, per_skill=40)


@pytest.fixture(scope="module")
def dialogues():
    return list(islice(training_dialogues(3), 2500))


def pictures_of(messages):
    return [picture for message in messages for picture in message.get("pictures", ())]


def seen_in(question):
    return [blobs(picture, SIZE) for picture in pictures_of(question.messages)]


def words_of(question):
    return question.casefold().rstrip("?.! ")


def of(questions, *skills):
    return [question for question in questions if question.skill in skills]


def with_pixels(questions, *skills):
    """Every fourth question, since looking at a picture takes long."""
    return of(questions, *skills)[::4]


def matching(blobs_seen, words):
    """The blobs that are "red stars", "crosses", "shapes"."""
    colour, _, kind = words.rpartition(" ")
    kind = re.sub("(?<=ss)es$|s$", "", kind) if kind != "cross" else kind
    return [
        blob for blob in blobs_seen if colour in ("", blob.colour) and kind in ("shape", blob.shape)
    ]


def test_counts_agree_with_the_pixels(questions):
    said = re.compile(r"(?P<words>.+): (?P<places>.+), so there (?:is|are) (?P<number>\d)\.")
    for question in with_pixels(questions, "counting"):
        [seen] = seen_in(question)
        told = said.fullmatch(question.answer)
        if told is None:
            words = re.fullmatch(r"There are no (.+)\.", question.answer)[1]
            assert not matching(seen, words), question
        else:
            found = [PLACES[blob.place] for blob in matching(seen, told["words"].lower())]
            assert re.split(", | and ", told["places"]) == found, question
            assert int(told["number"]) == len(found), question


def test_colour_place_and_shape_of_single_items_agree_with_the_pixels(questions):
    checked = Counter()
    for question in with_pixels(questions, "colour", "place", "shape"):
        [seen] = seen_in(question)
        if len(seen) == 1 and not pictures_of(question.messages)[0].number:
            [blob] = seen
            expected = {
                "colour": f" is {blob.colour}.",
                "place": f" is {PLACES[blob.place]}.",
                "shape": f" is a {blob.shape}.",
            }
            assert question.answer.endswith(expected[question.skill])
            checked[question.skill] += 1
    assert len(checked) == 3


def test_a_place_asked_about_holds_exactly_what_the_answer_says(questions):
    columns = {"on the left": 0, "on the right": 2}
    rows = {"at the top": 0, "at the bottom": 2}
    for question in with_pixels(questions, "region"):
        if pictures_of(question.messages)[0].number:
            continue
        place, what = re.fullmatch(r"((?:At|On|In) .+) is (.+)\.", question.answer).groups()
        place = place.lower()
        [seen] = seen_in(question)
        there = [
            f"{blob.colour} {blob.shape}"
            for blob in seen
            if place == PLACES[blob.place]
            or columns.get(place) == blob.place % 3
            or rows.get(place) == blob.place // 3
        ]
        assert there == ([] if what == "nothing" else [what.split(" ", 1)[1]]), question


def test_descriptions_name_everything_in_reading_order(questions):
    for question in with_pixels(questions, "description"):
        if pictures_of(question.messages)[0].number:
            continue
        [seen] = seen_in(question)
        told = re.split(", | and ", question.answer.lower().rstrip("."))
        expected = [f"{PLACES[blob.place]} is {blob.colour} {blob.shape}" for blob in seen]
        assert [re.sub(" an? ", " ", each) for each in told] == expected


def test_yes_and_no_agree_with_the_pixels(questions):
    for question in with_pixels(questions, "existence"):
        yes, words = re.fullmatch(r"(Yes|No), there is (?:an?|no) (.+)\.", question.answer).groups()
        [seen] = seen_in(question)
        words = "cross" if words == "cross" else words
        assert bool(matching(seen, words)) == (yes == "Yes"), question


def test_answers_about_colours_and_relations_agree_with_the_pixels(questions):
    for question in with_pixels(questions, "truth", "relation"):
        if pictures_of(question.messages)[0].number:
            continue
        [seen] = seen_in(question)
        *said, verdict = question.answer.rstrip(".").lower().split(", ")
        found = []
        for each in said:
            name, what = re.fullmatch("the (.+) is (.+)", each).groups()
            words = "shape" if name in ("object", "shape") else name
            [blob] = matching(seen, words)
            assert what == (blob.colour if question.skill == "truth" else PLACES[blob.place])
            found.append(blob)
        asked = words_of(question.messages[-1]["content"])
        if question.skill == "truth":
            true = found[0].colour in asked.split()
        else:
            true = any(
                holds(*found)
                for wordings, holds in RELATIONS.items()
                if any(words in asked for words in wordings)
            )
        assert verdict == f"so {'yes' if true else 'no'}", question


def test_without_a_picture_the_reply_says_so(questions):
    asked = of(questions, "no picture")
    assert {question.answer for question in asked} == {NO_PICTURE}
    assert not any(pictures_of(question.messages) for question in asked)


def test_equal_seeds_make_equal_dialogues_and_others_do_not():
    assert held_out(7, per_skill=3) == held_out(7, per_skill=3)
    assert held_out(7, per_skill=3) != held_out(8, per_skill=3)
    first, again, other = (list(islice(training_dialogues(seed), 20)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_no_held_out_item_or_sentence_is_in_training(questions, dialogues):
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
        assert len(asked) == 40
        assert len({question.messages[-1]["content"] for question in asked}) >= 15, skill
        if skill == "no picture":
            continue
        answers = Counter(question.answer for question in asked)
        assert answers.most_common(1)[0][1] <= 28, (skill, answers)


def test_training_has_every_skill_and_pictures_in_most_dialogues(dialogues):
    shown = [len(pictures_of(messages)) for messages in dialogues]
    assert Counter(shown).keys() == {0, 1, 2}
    assert shown.count(0) < 0.1 * len(shown)
    texts = {turn["content"] for messages in dialogues for turn in messages}
    assert any("opposite of" in text for text in texts)
    assert NO_PICTURE in texts


def test_training_has_both_orders_of_text_and_images(dialogues):
    seeing = [messages for messages in dialogues if pictures_of(messages)]
    text_first = [any(turn.get("text_first") for turn in messages) for messages in seeing]
    assert 0.45 < sum(text_first) / len(seeing) < 0.55


def test_requests_mark_images_that_come_after_the_text(questions):
    question = of(questions, "one of two")[0]
    requests = as_requests(with_text_first(question.messages), size=80)
    contents = [request["content"] for request in requests]
    assert contents == [
        turn["content"] + "[img]" * len(turn.get("pictures", ())) for turn in question.messages
    ]


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("It is red.", "red", True),
        ("The star is red, so yes.", "The star is red, so no.", False),
        ("On the left is nothing.", "On the left is a star.", False),
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
def test_a_reply_is_right_if_it_has_the_same_facts(answer, given, right):
    assert is_right(answer, given) == right


def test_different_answers_to_one_skill_never_pass_for_each_other(questions):
    """The words that an answer repeats from its question do not count."""
    for skill in [*SKILLS, "no picture"]:
        again = skill in ("shape", "colour", "place", "truth")
        answers = {question.answer for question in of(questions, skill)}
        said = {each: each.rpartition(" is ")[2] if again else each for each in answers}
        for one in answers:
            assert {said[other] for other in answers if is_right(one, other)} == {said[one]}


def test_requests_carry_the_pictures_as_png_of_the_size(questions):
    question = of(questions, "one of two")[0]
    requests = as_requests(question.messages, size=80)
    images = [data for request in requests for data in request.get("images", ())]
    assert [Image.open(io.BytesIO(data)).size for data in images] == [(80, 80)] * 2
    assert [request["content"] for request in requests] == [
        turn["content"] for turn in question.messages
    ]
    assert all(request.keys() <= {"role", "content", "images"} for request in requests)

"""The first training of the demo model's vision model: the content of each place of a picture.

Each place has one row of features. Linear classifiers predict from it the colour and the shape of
the item, the digits if it is a number, the background, and the place itself. These classifiers are
only used in training; afterwards the decoder reads the same rows.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from tools.demo_pictures import COLOURS, PLACES, SHAPES, Picture

UNASKED = -100
QUESTIONS = {
    "colour": 1 + len(COLOURS),  # 0: the place is empty
    "shape": 2 + len(SHAPES),  # 0: the place is empty; the last: a number
    "tens": 11,  # 0: the number has no tens
    "ones": 10,
    "light": 2,
    "place": len(PLACES),
}
# The weight of empty places, which is low because most places are empty.
EMPTY_WEIGHT = 0.25
WEIGHTS = {
    question: torch.tensor([EMPTY_WEIGHT] + [1.0] * (answers - 1))
    if question in ("colour", "shape")
    else None
    for question, answers in QUESTIONS.items()
}


class FactReaders(nn.Module):
    """Linear classifiers of features; the loss is the mean over all questions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.readers = nn.ModuleDict(
            {question: nn.Linear(width, answers) for question, answers in QUESTIONS.items()}
        )

    def losses(
        self, features: torch.Tensor, pictures: Sequence[Picture]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """`features` [pictures, places, width] -> the loss, and the share of right answers."""
        facts = torch.stack([facts_of(picture) for picture in pictures])
        rows = functional.layer_norm(features.float(), features.shape[-1:])
        losses, shares = [], {}
        for index, (question, reader) in enumerate(self.readers.items()):
            answers, wanted = reader(rows).flatten(0, 1), facts[..., index].flatten()
            if (wanted == UNASKED).all():
                continue
            losses.append(
                functional.cross_entropy(
                    answers, wanted, ignore_index=UNASKED, weight=WEIGHTS[question]
                )
            )
            # Only occupied places count for questions about items.
            asked = (wanted > 0) | ((question not in ("colour", "shape")) & (wanted != UNASKED))
            shares[question] = (answers.argmax(-1) == wanted)[asked].float().mean().item()
        return torch.stack(losses).mean(), shares


def facts_of(picture: Picture) -> torch.Tensor:
    """The labels [places, questions], in the order of QUESTIONS."""
    light = int(picture.background.light)
    places = torch.tensor([[0, 0, UNASKED, UNASKED, light, place] for place in range(len(PLACES))])
    colours = list(COLOURS)
    for item in picture.items:
        colour = 1 + colours.index(item.colour)
        if item.is_number:
            tens, ones = divmod(int(item.shape), 10)
            digits = [1 + tens if len(item.shape) > 1 else 0, ones]
            facts = [colour, 1 + len(SHAPES), *digits, light, item.place]
        else:
            facts = [colour, 1 + SHAPES.index(item.shape), UNASKED, UNASKED, light, item.place]
        places[item.place] = torch.tensor(facts)
    return places

"""Images are scaled down to a share of the context that is served."""

from typing import Protocol, Self, TypeVar

from model_zoo.images.prepared import ImageProcessor

# An image leaves this part of the context to text: instructions, a question, and an answer of 1,024
# tokens in the default context of 4,096. It is chosen so that images in the default area of Qwen-VL
# (2,675 rows) and pages in the largest size of Mistral 3 (3,025 rows) keep their size there.
TEXT_SHARE = 4


class ScalableProcessor(ImageProcessor, Protocol):
    """An image processor that can make fewer rows of features of an image.

    `within`: with upper bounds of size, or of the number of parts, lowered so that images have at
    most about `rows` rows of features, but not below the lower bound. What is made of images that
    have no more rows stays the same, except where their longer side alone is bounded. The grid of a
    prepared image means the same with and without.
    """

    def within(self, rows: int) -> Self: ...


Processor = TypeVar("Processor", bound=ScalableProcessor)


def scaled_to_context(processor: Processor, context_tokens: int | None) -> Processor:
    """The processor for a context of `context_tokens`; unchanged if that is None.

    A larger image could only be refused. How many images a conversation has is not known here: each
    may take its share, and together they may still exceed the context.
    """
    if context_tokens is None:
        return processor
    return processor.within(max(context_tokens - context_tokens // TEXT_SHARE, 1))

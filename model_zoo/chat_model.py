"""A loaded model: conversations become prompts, and its facts can be told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from model_zoo.chat.messages import (
    ChatTemplate,
    ImagePart,
    Message,
    render_unforged,
)
from model_zoo.chat.template_choice import template_of
from model_zoo.gguf.header import MetadataValue
from model_zoo.multimodal.image_cache import ImageLease
from model_zoo.multimodal.image_tags import tagged
from model_zoo.multimodal.prompt_layout import lay_out
from model_zoo.multimodal.vision import PromptImages, VisionModel
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.request import ImageSpan
from runtime.errors import RequestError
from runtime.vision.encoder import PreparedImage, VisionTower
from runtime.worker.model import DecoderModel

EFFORTS = ("low", "medium", "high", "max")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue; `spans` are the images among them, `images` each that differs once."""

    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
    images: tuple[PreparedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model file says about itself.

    `quantization`: such as "Q4_K_M", "Q8_0", "F16". `tensors`: name, type and shape in the file's
    order, fastest dimension first. `digest` names the file: SHA-256 in hex of its header and size.
    `modified_at` unix seconds. `chat_template`: the one in use, and `template_source` where it is
    from, such as "file" or "fallback (chatml)"; None where there is none. `pooling`: "mean", "cls"
    or "last", in files made for embedding. `sees`: whether it understands images. `projector`: the
    metadata of the file with its tower, where that is one of its own, and the number of its
    parameters as `general.parameter_count`.
    """

    architecture: str
    name: str
    quantization: str
    parameter_count: int
    file_bytes: int
    weight_bytes: int
    context_length: int
    embedding_length: int
    vocab_size: int
    block_count: int
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    chat_template: str | None
    template_source: str | None
    license: str | None
    digest: str
    modified_at: float
    pooling: str | None = None
    sees: bool = False
    projector: Mapping[str, MetadataValue] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ChatModel:
    """Everything that a model file holds, ready to answer; `template` None: it cannot chat.

    `variants`: further templates of the file by name, such as "tool_use". `vision` None: it
    understands text alone.
    """

    decoder: DecoderModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    description: ModelDescription
    variants: Mapping[str, ChatTemplate] = field(default_factory=dict)
    vision: VisionModel | None = None

    @property
    def tower(self) -> VisionTower | None:
        return None if self.vision is None else self.vision.tower

    def with_template(self, source: str, *, origin: str) -> "ChatModel":
        """The same model with another chat template; ModelFileError when that is not Jinja."""
        told = replace(self.description, chat_template=source, template_source=origin)
        template = template_of(source, self.tokenizer)
        return replace(self, template=template, variants={}, description=told)

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | str | None = None,
        variables: Mapping[str, Any] | None = None,
        at_most: int | None = None,
        now: datetime | None = None,
        lease: ImageLease | None = None,
    ) -> Prompt:
        """The conversation with the answer left open.

        tools: function schemas; rendered by the variant "tool_use" where the file has one.
        thinking: whether to think, or one of `EFFORTS`; None: the template's default.
        variables: additional template variables. They override those of `thinking` and contain
        none of the names that are set here.
        at_most: token budget of the prompt, by default the file's context length. Images beyond it
        are not decoded.
        now: the time that templates see, by default this machine's.
        lease: image cache lease, as in `VisionModel.see`.

        Raises RequestError for what the template or the model does not support.
        """
        if self.template is None:
            raise RequestError(
                "The model has no chat template (`tokenizer.chat_template`); send raw text to "
                "complete instead."
            )
        images = [part for message in messages for part in message.images]
        self._refuse_unseen(images)
        template = self.variants.get("tool_use", self.template) if tools else self.template
        placement = None if self.vision is None else self.vision.placement
        rendered = render_unforged(
            template,
            self.tokenizer,
            messages,
            {**_thinking_variables(thinking), **(variables or {}), "tools": tools or None},
            image=None if placement is None else placement.spelled,
            reserved=() if placement is None else placement.reserved,
            now=now,
        )
        texts = [rendered.text] if placement is None else rendered.text.split(placement.marker)
        if len(texts) != len(images) + 1:
            raise RequestError(
                f"The model's chat template shows {len(texts) - 1} of the conversation's "
                f"{len(images)} images; put images in the user's turns."
            )
        return self._prompt(texts, images, at_most, rendered.sentinel, lease)

    def prepare_text(
        self,
        text: str,
        images: Sequence[ImagePart] = (),
        *,
        at_most: int | None = None,
        lease: ImageLease | None = None,
    ) -> Prompt:
        """Raw text to continue; BOS by the file's own rule.

        `[img-N]` in the text is image N, from 0; images without a tag stand before the text. Line
        breaks around them are the writer's part.
        """
        self._refuse_unseen(images)
        if self.vision is None or not images:
            return self._prompt([text], [], at_most)
        placement = self.vision.placement
        before, _, after = placement.spelled.partition(placement.marker)
        texts, placed = [""], []
        for part in tagged(text, images):
            if isinstance(part, str):
                texts[-1] += part
            else:
                placed.append(part)
                texts[-1] += before.strip()
                texts.append(after.strip())
        return self._prompt(texts, placed, at_most, lease=lease)

    def _prompt(
        self,
        texts: Sequence[str],
        images: Sequence[ImagePart],
        at_most: int | None,
        sentinel: str = "",
        lease: ImageLease | None = None,
    ) -> Prompt:
        """`texts` with an image between each and the next."""
        seen = PromptImages()
        if self.vision is not None and images:
            room = self.decoder.context_length if at_most is None else at_most
            files = [image.data for image in images]
            seen = self.vision.see(files, at_most=room, lease=lease)
        laid = lay_out(self.tokenizer, texts, seen.shown, sentinel=sentinel)
        return Prompt(laid.tokens, laid.spans, seen.images)

    def _refuse_unseen(self, images: Sequence[ImagePart]) -> None:
        if images and self.vision is None:
            raise RequestError("The model sees no images; send texts only.")


def _thinking_variables(thinking: bool | str | None) -> dict[str, Any]:
    """The choice under each name that published templates read it by."""
    if thinking is None:
        return {}
    if isinstance(thinking, bool):
        return {"enable_thinking": thinking, "thinking": thinking}
    if thinking not in EFFORTS:
        raise RequestError(f'The thinking effort "{thinking}" is not one of {", ".join(EFFORTS)}.')
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": thinking}

"""A loaded model: turns conversations into prompts and describes its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.call_forms import CallForm, call_form
from model_zoo.chat.formats.fallbacks import readable
from model_zoo.chat.formats.reply_format import ReplyFormat, format_of
from model_zoo.chat.messages import ImagePart, Message, ReplyStart
from model_zoo.chat.sandbox.frames import RenderLimits
from model_zoo.chat.shown_texts import refuse_unshown
from model_zoo.chat.template_choice import TOOL_USE, template_of
from model_zoo.chat.template_language import as_jinja
from model_zoo.chat.thinking import thinking_variables, with_thinking_word
from model_zoo.chat.unforged import render_unforged
from model_zoo.gguf.header import MetadataValue
from model_zoo.layers.embedding_head import EmbeddingHead
from model_zoo.layers.ranking_head import RankingHead
from model_zoo.multimodal.image_cache import ImageLease
from model_zoo.multimodal.image_tags import tagged
from model_zoo.multimodal.prompt_layout import lay_out
from model_zoo.multimodal.vision_model import PromptImages, VisionModel
from model_zoo.tokenizers.infill import InfillTokens, infill_tokens
from model_zoo.tokenizers.pairs import PairFormat
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.request import ImageSpan
from runtime.errors import RequestError
from runtime.vision.encoder import PreparedImage, VisionTower
from runtime.worker.model import DecoderModel


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue. `spans`: the images among them; `images`: the distinct images.
    `thinks`: the prompt ends within thinking, so the reply begins there; `thought`: how many tokens
    of thinking the message to continue already has. `continues`: the prompt ends within the text of
    the reply. `reply_format`: the format of the reply to a conversation; `markup`: the control
    tokens that are part of its text, with their bytes; `call_form`: how grammars write its
    calls."""

    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
    images: tuple[PreparedImage, ...] = ()
    thinks: bool = False
    thought: int = 0
    continues: bool = False
    reply_format: ReplyFormat | None = None
    markup: Mapping[int, bytes] = field(default_factory=dict)
    call_form: CallForm | None = None


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter in use; `digest`: SHA-256 in hex of the file's header and size."""

    path: Path
    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The facts that a model file states.

    quantization: such as "Q4_K_M", "Q8_0", "F16".
    tensors: name, type and shape in the file's order, fastest dimension first.
    digest: SHA-256 in hex of the file's header and size.
    modified_at: unix seconds.
    chat_template: the template in use, as it was written. template_source: its origin, such as
    "file" or "fallback (chatml)". Both None if there is none.
    pooling: "mean", "cls" or "last" in files made for embedding, "rank" in rerankers.
    projector: metadata of a separate projector file, with its `general.parameter_count`.
    matrix_bytes: bytes of the file's matrices, which models of the same file can share.
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
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    chat_template: str | None
    template_source: str | None
    license: str | None
    digest: str
    modified_at: float
    pooling: str | None = None
    projector: Mapping[str, MetadataValue] | None = None
    adapters: tuple[AdapterFacts, ...] = ()
    matrix_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ChatModel:
    """A model file, loaded: decoder, tokenizer, chat template and vision model.

    template: None if the file has none; the model then cannot chat. variants: further templates of
    the file by name, such as "tool_use". vision: None if the model accepts text only. suffix_first:
    the tokens of infill prompts are in the order text after, text before, answer. ranking: the head
    of a reranker. pairs: how it reads a query and a text. embedding_head: None if pooled states are
    the vectors of texts. for_tools: whether the file has a template for tools, even one that is not
    used.
    """

    decoder: DecoderModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    description: ModelDescription
    variants: Mapping[str, ChatTemplate] = field(default_factory=dict)
    vision: VisionModel | None = None
    suffix_first: bool = False
    ranking: RankingHead | None = None
    pairs: PairFormat | None = None
    embedding_head: EmbeddingHead | None = None
    for_tools: bool = False

    @property
    def reply_format(self) -> ReplyFormat:
        """How the model writes thinking and tool calls."""
        template = self._tool_template
        if template is None:
            return format_of(None)
        return format_of(template.source, template.supports_tools)

    @property
    def calls_tools(self) -> bool:
        """Whether the model was trained to call tools, as far as its templates tell. Others get
        tools as text, too, and may write calls or not."""
        return self.reply_format.tools or self.for_tools

    @property
    def markup(self) -> dict[int, bytes]:
        """The control tokens that are part of the text of replies, with their bytes."""
        control = self.tokenizer.vocabulary.control
        writable = () if self.vision is None else self.vision.placeholders.texts.writable
        texts = self.reply_format.markup.union(writable) & control.keys()
        return {control[text]: text.encode() for text in texts}

    @property
    def _tool_template(self) -> ChatTemplate | None:
        return self.variants.get(TOOL_USE, self.template)

    @property
    def tower(self) -> VisionTower | None:
        return None if self.vision is None else self.vision.tower

    def with_template(
        self, source: str, *, origin: str, most: RenderLimits | None = None
    ) -> "ChatModel":
        """The same model with another chat template, in Jinja or Go's language; ModelFileError if
        it does not compile or cannot be converted. `most`: upper limits of each rendering."""
        told = replace(self.description, chat_template=source, template_source=origin)
        template = template_of(as_jinja(source), self.tokenizer, most=most)
        return replace(self, template=template, variants={}, for_tools=False, description=told)

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | str | None = None,
        thinking_budget: int | None = None,
        variables: Mapping[str, Any] | None = None,
        reply: ReplyStart = ReplyStart.NEW,
        at_most: int | None = None,
        now: datetime | None = None,
        lease: ImageLease | None = None,
    ) -> Prompt:
        """The prompt of a conversation.

        reply: what the prompt ends with. A last message to continue that is empty is left out.
        tools: function schemas; rendered by the variant "tool_use" if the file has one. Templates
        that do not show tools, calls or results receive them as text (`formats.fallbacks`).
        thinking: whether to think, or one of `thinking.EFFORTS`; None: the template's default.
        thinking_budget: in tokens, for templates that tell it to the model; None: no limit.
        variables: further template variables, which override those of `thinking` but not others.
        at_most: token budget of the prompt (default: the context). Images beyond are not decoded.
        now: the time that templates see, by default this machine's.
        lease: image cache lease, as in `VisionModel.prepare`.

        Raises RequestError for what the template or the model does not support.
        """
        template = self._template_for(tools)
        messages, tools = readable(template, messages, tools, self.reply_format.name)
        if reply is ReplyStart.CONTINUED:
            messages, reply = _continued(messages)
        messages = with_thinking_word(template.turns.adapted(messages), thinking, template)
        images = [part for message in messages for part in message.images]
        self._check_images_supported(images)
        given = thinking_variables(thinking, template, budget=thinking_budget)
        own = {"tools": tools or None, "add_generation_prompt": reply is ReplyStart.NEW}
        rendered = render_unforged(
            template,
            self.tokenizer,
            messages,
            {**given, **(variables or {}), **own},
            images=None if self.vision is None else self.vision.placeholders.texts,
            continued=reply is ReplyStart.CONTINUED,
            now=now,
        )
        refuse_unshown(rendered.plain, messages, tools)
        texts = self._texts_around(images, rendered.text)
        prompt = self._prompt(texts, images, at_most, rendered.sentinel, lease)
        begun = messages[-1].text if reply is ReplyStart.CONTINUED else None
        return self._with_reply_format(prompt, rendered.text, begun)

    def _texts_around(self, images: Sequence[ImagePart], text: str) -> list[str]:
        """The rendered text, divided at its images."""
        texts = [text] if self.vision is None else text.split(self.vision.placeholders.texts.marker)
        if len(texts) != len(images) + 1:
            raise RequestError(
                f"The model's chat template shows {len(texts) - 1} of the conversation's "
                f"{len(images)} images; put images in the user's turns."
            )
        return texts

    def _with_reply_format(self, prompt: Prompt, text: str, begun: str | None) -> Prompt:
        """The prompt, completed with the format of its reply. `text`: the text of the prompt;
        `begun`: the part of it that the reply continues."""
        replies, template = self.reply_format, self._tool_template
        thought = None if begun is None else replies.begun_thinking(begun)
        thinks = replies.opens_thinking(text) if begun is None else thought is not None
        return replace(
            prompt,
            thinks=thinks,
            thought=len(self.tokenizer.encode(thought)) if thought else 0,
            continues=begun is not None and not thinks,
            reply_format=replies,
            markup=self.markup,
            call_form=call_form(replies.name, "" if template is None else template.source),
        )

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        if self.template is None:
            raise RequestError(
                "The model has no chat template (`tokenizer.chat_template`); send raw text to "
                "complete instead."
            )
        return self.variants.get(TOOL_USE, self.template) if tools else self.template

    def prepare_text(
        self,
        text: str,
        images: Sequence[ImagePart] = (),
        *,
        bos: bool = True,
        at_most: int | None = None,
        lease: ImageLease | None = None,
    ) -> Prompt:
        """The prompt of raw text; BOS is added if `bos` is set and the file states so.

        `[img-N]` in the text stands for image N, from 0; images without a tag precede the text.
        Line breaks around images are not added.
        """
        self._check_images_supported(images)
        if self.vision is None or not images:
            return self._prompt([text], [], at_most, bos=bos)
        written = self.vision.placeholders.texts
        before, _, after = written.spelled.partition(written.marker)
        texts, placed = [""], []
        for part in tagged(text, images):
            if isinstance(part, str):
                texts[-1] += part
            else:
                placed.append(part)
                texts[-1] += before.strip()
                texts.append(after.strip())
        return self._prompt(texts, placed, at_most, lease=lease, bos=bos)

    @property
    def inserts(self) -> bool:
        """Whether the model supports infill, text between two others."""
        by_template = self.template is not None and self.template.supports_suffix
        return by_template or self._infill_tokens is not None

    @property
    def _infill_tokens(self) -> InfillTokens | None:
        return infill_tokens(self.description.metadata, self.tokenizer.vocabulary)

    def prepare_infill(self, before: str, after: str, *, now: datetime | None = None) -> Prompt:
        """The prompt for a text between two others: by the template if it supports that, otherwise
        by the file's infill tokens, in the order text before, text after, answer unless
        `suffix_first`.

        Only for a model that `inserts`.
        """
        if self.template is not None and self.template.supports_suffix:
            variables = {"prompt": before, "suffix": after}
            rendered = render_unforged(self.template, self.tokenizer, (), variables, now=now)
            return self._prompt([rendered.text], [], None, rendered.sentinel)
        tokens = self._infill_tokens
        assert tokens is not None
        first = [tokens.before, *self.tokenizer.cut(before, parse_special=False)]
        second = [tokens.after, *self.tokenizer.cut(after, parse_special=False)]
        if self.suffix_first:
            first, second = second, first
        encoded = self.tokenizer.encode_parts([*first, *second, tokens.middle])
        encoded = self.tokenizer.with_bos(encoded)
        return Prompt(tuple(encoded))

    def _prompt(
        self,
        texts: Sequence[str],
        images: Sequence[ImagePart],
        at_most: int | None,
        sentinel: str = "",
        lease: ImageLease | None = None,
        *,
        bos: bool = True,
    ) -> Prompt:
        """The prompt of `texts` with an image between each two of them."""
        seen = PromptImages()
        if self.vision is not None and images:
            room = self.decoder.context_length if at_most is None else at_most
            seen = self.vision.prepare(images, at_most=room, lease=lease)
        laid = lay_out(self.tokenizer, texts, seen.pieces, sentinel=sentinel, bos=bos)
        return Prompt(laid.tokens, laid.spans, seen.images)

    def _check_images_supported(self, images: Sequence[ImagePart]) -> None:
        if images and self.vision is None:
            raise RequestError("The model does not support images; send texts only.")


def _continued(messages: Sequence[Message]) -> tuple[Sequence[Message], ReplyStart]:
    """The conversation without its last message if that is empty, and what its prompt ends with.

    Raises RequestError if the last message is not the beginning of an answer."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls:
        raise RequestError(
            "Only a message of the assistant without tool calls can be continued; end the "
            "conversation with one."
        )
    if last.content or last.thinking:
        return messages, ReplyStart.CONTINUED
    return messages[:-1], ReplyStart.NEW

"""A loaded model: conversations become prompts, and its facts can be told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_zoo.chat import ChatTemplate, Message, encode_chat
from model_zoo.gguf.header import MetadataValue
from model_zoo.tokenizer import Tokenizer
from runtime.errors import RequestError
from runtime.model import DecoderModel

EFFORTS = ("low", "medium", "high", "max")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue; `spans` are the images among them."""

    tokens: tuple[int, ...]
    spans: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model file says about itself.

    `quantization`: such as "Q4_K_M", "Q8_0", "F16". `tensors`: name, type and shape in the file's
    order, fastest dimension first. `digest` names the file: SHA-256 in hex of its header and size.
    `modified_at` unix seconds. `chat_template`: the one in use, and `template_source` where it is
    from, such as "file" or "fallback (chatml)"; None where there is none. `pooling`: "mean", "cls"
    or "last", in files made for embedding.
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


@dataclass(frozen=True, slots=True, eq=False)
class ChatModel:
    """Everything that a model file holds, ready to answer; `template` None: it cannot chat.

    `variants`: further templates of the file by name, such as "tool_use".
    """

    decoder: DecoderModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    description: ModelDescription
    variants: Mapping[str, ChatTemplate] = field(default_factory=dict)

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | str | None = None,
    ) -> Prompt:
        """The conversation with the answer left open.

        `tools` are function schemas; the variant "tool_use" takes them where the file has one.
        `thinking`: whether to think, or with which of `EFFORTS`; None leaves it to the template.
        RequestError names what the template does not support; images no model sees yet.
        """
        if self.template is None:
            raise RequestError(
                f"Model {self.description.name} has no chat template "
                "(`tokenizer.chat_template`); send raw text to complete instead."
            )
        if any(message.images for message in messages):
            raise RequestError(f"Model {self.description.name} sees no images; send texts only.")
        template = self.variants.get("tool_use", self.template) if tools else self.template
        tokens = encode_chat(
            template,
            self.tokenizer,
            messages,
            tools=tools or None,
            **_thinking_variables(thinking),
        )
        return Prompt(tuple(tokens))

    def prepare_text(self, text: str) -> Prompt:
        """Raw text to continue; BOS by the file's own rule."""
        return Prompt(tuple(self.tokenizer.encode_prompt(text)))


def _thinking_variables(thinking: bool | str | None) -> dict[str, Any]:
    """The choice under each name that published templates read it by."""
    if thinking is None:
        return {}
    if isinstance(thinking, bool):
        return {"enable_thinking": thinking, "thinking": thinking}
    if thinking not in EFFORTS:
        raise RequestError(f'The thinking effort "{thinking}" is not one of {", ".join(EFFORTS)}.')
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": thinking}

"""A loaded model: conversations become prompts, and its facts can be told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from model_zoo.chat import ChatTemplate, Message, encode_chat
from model_zoo.gguf.header import MetadataValue
from model_zoo.tokenizer import Tokenizer
from runtime.errors import RequestError
from runtime.model import DecoderModel


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
    from, such as "file" or "fallback (chatml)"; None where there is none.
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

    def prepare(self, messages: Sequence[Message], *, thinking: bool | None = None) -> Prompt:
        """The conversation with the answer left open; `thinking` None leaves it to the template."""
        if self.template is None:
            raise RequestError(
                f"Model {self.description.name} has no chat template "
                "(`tokenizer.chat_template`); send raw text to complete instead."
            )
        choice = {} if thinking is None else {"enable_thinking": thinking}
        return Prompt(tuple(encode_chat(self.template, self.tokenizer, messages, **choice)))

    def prepare_text(self, text: str) -> Prompt:
        """Raw text to continue; BOS by the file's own rule."""
        return Prompt(tuple(self.tokenizer.encode_prompt(text)))

"""The table of operations that `/openapi.json` describes: method, path, protocol, body type."""

from dataclasses import dataclass
from enum import StrEnum

from serve_app.api import (
    anthropic,
    embeddings,
    ollama,
    ollama_management,
    ollama_models,
    reranking,
)
from serve_app.api.fields import Body
from serve_app.api.openai_chat import ChatCompletionBody
from serve_app.api.openai_completions import CompletionBody
from serve_app.api.responses_body import ResponsesBody
from serve_app.api.tokenization import DetokenizeBody, TokenizeBody

JSON, NDJSON, SSE = "application/json", "application/x-ndjson", "text/event-stream"
TEXT, HTML, BINARY = "text/plain", "text/html", "application/octet-stream"


class Protocol(StrEnum):
    """The protocol of an operation, which determines its error format."""

    OLLAMA = "Ollama"
    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `body`: the type that parses a JSON body. `media_types`: media types of a successful response;
    none if it has no body. `uploads`: the body is a file.
    """

    method: str
    path: str
    protocol: Protocol
    summary: str
    body: type[Body] | None = None
    media_types: tuple[str, ...] = (JSON,)
    uploads: bool = False

    @property
    def group(self) -> str:
        """Its tag: the protocol, or this server for what belongs to none."""
        own = self.protocol is Protocol.OLLAMA and not self.path.startswith("/api/")
        return OWN_GROUP if own else self.protocol


OWN_GROUP = "Caravan"
_OLLAMA, _OPENAI, _ANTHROPIC = Protocol

OPERATIONS = (
    Operation("GET", "/", _OLLAMA, "Greet clients", media_types=(TEXT,)),
    Operation("GET", "/healthz", _OLLAMA, "Show that the ingress is running"),
    Operation("GET", "/readyz", _OLLAMA, "Show whether the models have started (503 before)"),
    Operation("GET", "/health", _OLLAMA, "The same, as llama.cpp's and vLLM's servers call it"),
    Operation("GET", "/openapi.json", _OLLAMA, "Describe the HTTP interface"),
    Operation("GET", "/status", _OLLAMA, "Show the status page", media_types=(HTML,)),
    Operation("GET", "/status.json", _OLLAMA, "Show the state of models and replicas"),
    Operation("GET", "/docs", _OLLAMA, "Show this document as a page", media_types=(HTML,)),
    Operation("GET", "/metrics", _OLLAMA, "Export metrics to Prometheus", media_types=(TEXT,)),
    Operation("GET", "/api/version", _OLLAMA, "Show the versions of the API and the server"),
    Operation("POST", "/api/chat", _OLLAMA, "Answer a chat", ollama.ChatBody, (NDJSON, JSON)),
    Operation(
        "POST", "/api/generate", _OLLAMA, "Answer a prompt", ollama.GenerateBody, (NDJSON, JSON)
    ),
    Operation("POST", "/api/embed", _OLLAMA, "Embed texts", embeddings.EmbedBody),
    Operation("POST", "/api/embeddings", _OLLAMA, "Embed one text", embeddings.OlderBody),
    Operation("GET", "/api/tags", _OLLAMA, "List models"),
    Operation("GET", "/api/ps", _OLLAMA, "List loaded models"),
    Operation("POST", "/api/show", _OLLAMA, "Describe a model", ollama_models.ShowBody),
    Operation(
        "POST", "/api/pull", _OLLAMA, "Pull a model", ollama_management.TransferBody, (NDJSON, JSON)
    ),
    Operation(
        "POST",
        "/api/create",
        _OLLAMA,
        "Create a model",
        ollama_management.CreateBody,
        (NDJSON, JSON),
    ),
    Operation("POST", "/api/copy", _OLLAMA, "Copy a model", ollama_management.CopyBody, ()),
    Operation("DELETE", "/api/delete", _OLLAMA, "Delete a model", ollama_management.DeleteBody, ()),
    Operation("HEAD", "/api/blobs/{digest}", _OLLAMA, "Show whether a file exists", media_types=()),
    Operation(
        "POST", "/api/blobs/{digest}", _OLLAMA, "Upload a file", media_types=(), uploads=True
    ),
    Operation(
        "POST", "/api/push", _OLLAMA, "Push a model", ollama_management.TransferBody, (NDJSON, JSON)
    ),
    Operation(
        "POST", "/v1/chat/completions", _OPENAI, "Answer a chat", ChatCompletionBody, (JSON, SSE)
    ),
    Operation("POST", "/v1/completions", _OPENAI, "Continue a text", CompletionBody, (JSON, SSE)),
    Operation("POST", "/v1/embeddings", _OPENAI, "Embed texts", embeddings.EmbeddingsBody),
    Operation("POST", "/v1/rerank", _OPENAI, "Rank documents", reranking.RerankBody),
    Operation("POST", "/v1/score", _OPENAI, "Score pairs of texts", reranking.ScoreBody),
    Operation("POST", "/tokenize", _OPENAI, "List the tokens of a prompt", TokenizeBody),
    Operation("POST", "/detokenize", _OPENAI, "Join tokens to a text", DetokenizeBody),
    Operation(
        "POST", "/v1/responses", _OPENAI, "Answer a conversation", ResponsesBody, (JSON, SSE)
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        _OPENAI,
        "Count the tokens of a prompt",
        ResponsesBody,
    ),
    Operation("GET", "/v1/responses/{id}", _OPENAI, "Show a stored response"),
    Operation("DELETE", "/v1/responses/{id}", _OPENAI, "Delete a stored response"),
    Operation("POST", "/v1/responses/{id}/cancel", _OPENAI, "Cancel a response (refused)"),
    Operation("GET", "/v1/responses/{id}/input_items", _OPENAI, "List a response's input"),
    Operation("GET", "/v1/models", _OPENAI, "List models"),
    Operation("GET", "/v1/models/{model}", _OPENAI, "Describe a model"),
    Operation(
        "POST",
        "/v1/messages",
        _ANTHROPIC,
        "Answer a conversation",
        anthropic.MessagesBody,
        (JSON, SSE),
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        _ANTHROPIC,
        "Count the tokens of a prompt",
        anthropic.MessagesBody,
    ),
)

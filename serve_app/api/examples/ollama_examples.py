"""Examples of Ollama's protocol and of this server's own operations."""

from typing import Any

from serve_app.api.examples.example import Example, Examples

_QUESTION = "What is 17 + 25?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_AT = "2026-01-05T09:30:00.000000Z"
_DIGEST = "74a713d1a3c2ed4e8c53fc983e0e2214b62e9337775e83137cf76c71575c6889"
_LAYER = "sha256:74a11e3f0d0a7e8c1f6ed0b04f5a0a7c62e9e2a6cbd3a9d1a8f52d7e4f6b9c10"
_TEMPLATE = "{% for message in messages %}..."
_DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "gemma3",
    "families": ["gemma3"],
    "parameter_size": "7.77M",
    "quantization_level": "Q8_0",
    "context_length": 1024,
    "embedding_length": 256,
}
_NAMES = {"name": "demo:latest", "model": "demo:latest"}
_MORE = {"done": False}
_END = {"done": True, "done_reason": "stop"}
# Times in nanoseconds.
_COUNTS = {
    "total_duration": 50109294,
    "load_duration": 379544,
    "prompt_eval_count": 18,
    "prompt_eval_duration": 4523283,
    "eval_count": 12,
    "eval_duration": 12271894,
}
_CONTEXT = [1, 271, 201, 307, 274, 223, 19, 25]
_VECTORS = [[-0.7759, -0.2937, 0.1909, -0.5247], [0.5827, -0.6416, -0.4502, -0.2147]]
_SHORTENED = "Long values of the reply are shortened here."
_MANAGED = "For servers with models on demand and, where they have API keys, keys with `manage`."
_PULLED = {"digest": _LAYER, "total": 1321082688}


def _chat(content: str, end: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {"model": "demo", "created_at": _AT, "message": message, **end}


def _generated(text: str, end: dict[str, Any]) -> dict[str, Any]:
    return {"model": "demo", "created_at": _AT, "response": text, **end}


_CHAT_END = {**_END, **_COUNTS}
_GENERATE_END = {**_END, "context": _CONTEXT, **_COUNTS}

EXAMPLES: Examples = {
    "GET /healthz": (Example(reply={"status": "ok"}),),
    "GET /readyz": (Example(reply={"status": "ok"}),),
    "GET /health": (Example(reply={"status": "ok"}),),
    "GET /status.json": (
        Example(
            reply={
                "at": 1784623118.449252,
                "models": [
                    {
                        "name": "demo",
                        "replicas": [
                            {
                                "id": "k3v9x0aq",
                                "waiting": 0,
                                "running": 2,
                                "slots": 4,
                                "queued_tokens": 0,
                                "pages_total": 96,
                                "pages_owned": 7,
                                "images_waiting": 0,
                                "computed_tokens_total": 5120,
                                "prompt_tokens_total": 4010,
                                "cached_tokens_total": 1312,
                                "completion_tokens_total": 1630,
                                "preemptions_total": 0,
                            }
                        ],
                    }
                ],
            }
        ),
    ),
    "GET /api/version": (Example(reply={"version": "0.13.5", "caravan": "0.1.0"}),),
    "POST /api/chat": (
        Example(
            {"model": "demo", "messages": _MESSAGES},
            [_chat("17", _MORE), _chat(" + 25 = 42.", _MORE), _chat("", _CHAT_END)],
        ),
        Example(
            {"model": "demo", "messages": _MESSAGES, "stream": False},
            _chat("17 + 25 = 42.", _CHAT_END),
        ),
    ),
    "POST /api/generate": (
        Example(
            {"model": "demo", "prompt": _QUESTION},
            [
                _generated("17", _MORE),
                _generated(" + 25 = 42.", _MORE),
                _generated("", _GENERATE_END),
            ],
            _SHORTENED,
        ),
        Example(
            {"model": "demo", "prompt": _QUESTION, "stream": False},
            _generated("17 + 25 = 42.", _GENERATE_END),
            _SHORTENED,
        ),
    ),
    "POST /api/embed": (
        Example(
            {"model": "demo", "input": ["hot", "cold"], "dimensions": 4},
            {
                "model": "demo",
                "embeddings": _VECTORS,
                "total_duration": 8107150,
                "load_duration": 522758,
                "prompt_eval_count": 4,
            },
        ),
    ),
    "POST /api/embeddings": (
        Example(
            {"model": "demo", "prompt": "hot"},
            {"embedding": [-2.7811, -1.0526, 0.6841, -1.8806]},
            _SHORTENED,
        ),
    ),
    "GET /api/tags": (
        Example(
            reply={
                "models": [
                    {
                        **_NAMES,
                        "modified_at": _AT,
                        "size": 10959680,
                        "digest": _DIGEST,
                        "details": _DETAILS,
                        "capabilities": ["completion", "vision", "tools"],
                    }
                ]
            }
        ),
    ),
    "GET /api/ps": (
        Example(
            reply={
                "models": [
                    {
                        **_NAMES,
                        "size": 49610950,
                        "digest": _DIGEST,
                        "details": _DETAILS,
                        "expires_at": "2318-01-01T00:00:00Z",
                        "size_vram": 0,
                        "context_length": 768,
                        "replicas": 1,
                    }
                ]
            }
        ),
    ),
    "POST /api/show": (
        Example(
            {"model": "demo"},
            {
                "license": "apache-2.0",
                "modelfile": f'FROM demo:latest\nTEMPLATE """{_TEMPLATE}"""',
                "parameters": "num_ctx                        768",
                "template": _TEMPLATE,
                "details": _DETAILS,
                "model_info": {
                    "general.architecture": "gemma3",
                    "general.parameter_count": 7771520,
                    "gemma3.block_count": 6,
                    "gemma3.context_length": 1024,
                    "gemma3.embedding_length": 256,
                },
                "tensors": [{"name": "token_embd.weight", "type": "Q8_0", "shape": [256, 1024]}],
                "capabilities": ["completion", "vision", "tools"],
                "modified_at": _AT,
            },
            _SHORTENED,
        ),
    ),
    "POST /api/pull": (
        Example(
            {"model": "llama3.2:1b"},
            [
                {"status": "pulling manifest"},
                {"status": "pulling 74a11e3f0d0a", **_PULLED, "completed": 262144000},
                {"status": "pulling 74a11e3f0d0a", **_PULLED, "completed": 1321082688},
                {"status": "writing manifest"},
                {"status": "success"},
            ],
            _MANAGED,
        ),
    ),
    "POST /api/create": (
        Example(
            {"model": "brief", "from": "llama3.2:1b", "system": "Answer with one word."},
            [
                {"status": f"creating new layer {_LAYER}"},
                {"status": "writing manifest"},
                {"status": "success"},
            ],
            _MANAGED,
        ),
    ),
    "POST /api/copy": (
        Example({"source": "brief", "destination": "registry.example/me/brief"}, note=_MANAGED),
    ),
    "POST /api/push": (
        Example(
            {"model": "registry.example/me/brief"},
            [
                {"status": "retrieving manifest"},
                {"status": "pushing 74a11e3f0d0a", **_PULLED, "completed": 1321082688},
                {"status": "pushing manifest"},
                {"status": "success"},
            ],
            _MANAGED,
        ),
    ),
    "DELETE /api/delete": (Example({"model": "brief"}, note=_MANAGED),),
}

"""All metrics that the application exports: names, labels, buckets. docs/metrics.md lists them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels`: in the order in which `Meter` takes their values. `buckets`: the upper bounds of a
    histogram, ascending."""

    name: str
    kind: Kind
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_C, _G, _H = Kind
# From a fast GPU to a CPU with a long queue.
_WAITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0, 30.0)
_REPLY = ("model", "key")

# ---- of the ingress

REQUESTS = Metric(
    "caravan_requests_total",
    _C,
    "HTTP requests that have ended. Status 499: the client left before the status was sent.",
    ("protocol", "status", "key"),
)
REQUEST_SECONDS = Metric(
    "caravan_request_duration_seconds",
    _H,
    "From the arrival of an HTTP request to the end of its response.",
    ("protocol",),
    _WAITS_S,
)
REPLIES = Metric(
    "caravan_replies_total",
    _C,
    "Tasks of models that have ended, by how: the finish of the answer, error, refused (the "
    "request was at fault) or cancelled (the client left).",
    (*_REPLY, "finish"),
)
QUEUE_SECONDS = Metric(
    "caravan_queue_seconds", _H, "From a task's arrival to its first step.", ("model",), _WAITS_S
)
FIRST_TOKEN_SECONDS = Metric(
    "caravan_time_to_first_token_seconds",
    _H,
    "From the arrival of the HTTP request to the first token.",
    _REPLY,
    _WAITS_S,
)
BETWEEN_TOKENS_SECONDS = Metric(
    "caravan_time_between_tokens_seconds",
    _H,
    "Mean time between the tokens of an answer, once for each answer of two tokens or more.",
    _REPLY,
    _TOKEN_S,
)
LONGEST_GAP_SECONDS = Metric(
    "caravan_longest_gap_seconds",
    _H,
    "The longest time between two deliveries of an answer, once for each answer.",
    ("model",),
    _TOKEN_S,
)
PROMPT_TOKENS = Metric("caravan_prompt_tokens_total", _C, "Tokens of prompts.", _REPLY)
CACHED_TOKENS = Metric(
    "caravan_cached_prompt_tokens_total",
    _C,
    "Those tokens of prompts that were in the prefix cache.",
    _REPLY,
)
COMPLETION_TOKENS = Metric("caravan_completion_tokens_total", _C, "Tokens of answers.", _REPLY)
FAILOVERS = Metric(
    "caravan_failovers_total",
    _C,
    "Tasks that left a replica before their end, by cause: lost, drained, refused (no room) or "
    "moved (another would start it earlier).",
    ("model", "cause"),
)

# ---- of engines, by field of EngineStatistics


def _engine(name: str, kind: Kind, description: str) -> Metric:
    return Metric(f"caravan_engine_{name}", kind, description, ("model", "replica"))


ENGINE: Mapping[str, Metric] = {
    "waiting": _engine("requests_waiting", _G, "Requests that wait for a slot."),
    "running": _engine("requests_running", _G, "Requests with a slot: the batch size."),
    "slots": _engine("slots", _G, "Requests that can run at once."),
    "queued_tokens": _engine("queued_tokens", _G, "Prompt tokens that are not computed yet."),
    "pages_total": _engine("cache_pages", _G, "Pages of the KV cache."),
    "pages_owned": _engine("cache_pages_used", _G, "Pages that requests own, without mere cache."),
    "tokens_per_s": _engine("prefill_tokens_per_second", _G, "Recent speed of full steps."),
    "images_waiting": _engine("images_waiting", _G, "Images being encoded or queued for it."),
    "steps_total": _engine("steps_total", _C, "Steps."),
    "computed_tokens_total": _engine("computed_prompt_tokens_total", _C, "Prompt tokens computed."),
    "prompt_tokens_total": _engine(
        "prompt_tokens_total", _C, "Tokens of the prompts of ended requests."
    ),
    "cached_tokens_total": _engine(
        "cached_prompt_tokens_total", _C, "Those of them that were in the prefix cache."
    ),
    "completion_tokens_total": _engine("completion_tokens_total", _C, "Tokens generated."),
    "preemptions_total": _engine(
        "preemptions_total", _C, "Requests that lost their pages to others."
    ),
    "shifts_total": _engine("shifts_total", _C, "Full contexts whose older half was dropped."),
    "proposed_tokens_total": _engine(
        "proposed_tokens_total", _C, "Tokens proposed by speculation."
    ),
    "accepted_tokens_total": _engine(
        "accepted_tokens_total", _C, "Those of them that were sampled."
    ),
    "drafted_tokens_total": _engine(
        "drafted_tokens_total", _C, "Those of the proposed tokens that a draft model proposed."
    ),
    "accepted_drafts_total": _engine(
        "accepted_drafts_total", _C, "Those of them that were sampled."
    ),
    "images_encoded_total": _engine(
        "images_encoded_total", _C, "Images whose features were computed."
    ),
    "checkpoints_held": _engine("state_checkpoints", _G, "Checkpoints of recurrent states held."),
    "checkpoints_taken_total": _engine("state_checkpoints_taken_total", _C, "Checkpoints taken."),
    "checkpoint_hits_total": _engine(
        "state_checkpoint_hits_total", _C, "Sequences that started from a checkpoint."
    ),
    "host_pages_stored_total": _engine(
        "host_pages_stored_total", _C, "Cache pages copied to host memory."
    ),
    "host_pages_restored_total": _engine(
        "host_pages_restored_total", _C, "Cache pages copied back from it."
    ),
}

# ---- of vision encoders with a deployment of their own, by field of EncoderStatistics


def _encoder(name: str, kind: Kind, description: str) -> Metric:
    return Metric(f"caravan_encoder_{name}", kind, description, ("encoder", "replica"))


ENCODER: Mapping[str, Metric] = {
    "images_waiting": _encoder("images_waiting", _G, "Images requested and not answered."),
    "images_encoded_total": _encoder("images_encoded_total", _C, "Images encoded."),
    "images_known_total": _encoder("images_cached_total", _C, "Images answered from the cache."),
    "batches_total": _encoder("batches_total", _C, "Calls of the model."),
}
ENCODER_SECONDS = Metric(
    "caravan_encoder_image_seconds",
    _H,
    "From the request for an image to its features, with transfer and queue.",
    ("encoder",),
    _WAITS_S,
)

# ---- of `/metrics` itself

NODES_UNREACHABLE = Metric(
    "caravan_nodes_unreachable",
    _G,
    "Nodes whose Ray metrics agent did not answer; their processes are missing here.",
)

_NAMED = tuple(each for each in globals().copy().values() if isinstance(each, Metric))
METRICS = (*_NAMED, *ENGINE.values(), *ENCODER.values())

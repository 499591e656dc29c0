"""Chat templates of requests, which replace the model's own."""

import threading
from collections import OrderedDict

from model_zoo.chat.sandbox.frames import RenderLimits
from model_zoo.chat_model import ChatModel
from runtime.errors import ModelFileError, RequestError

# Compiled templates are kept for further requests; each has up to two processes.
MAX_KEPT = 4
# Limits the time of a compilation, which any client can request; published templates have at most
# half as many characters.
MAX_CHARACTERS = 1 << 15
# Limits of a rendering that do not grow with the conversation, because any client can send a
# template and a long conversation with it.
MOST = RenderLimits(seconds=1.0, memory_bytes=128 << 20, reply_bytes=8 << 20)


class RequestTemplates:
    """Variants of one model with the templates of requests. Thread-safe."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._kept: OrderedDict[tuple[str, str], ChatModel] = OrderedDict()
        self._lock = threading.Lock()

    def model(self, template: str, *, salt: str, default: str = "") -> ChatModel:
        """The model with this template; unchanged for an empty one, unless it has no template of
        its own: then with the `default`. `salt`: the `cache_salt` of the task, without which
        response times would reveal the templates of other tenants. RequestError for a template
        that is too long or does not compile."""
        if not template and self._model.template is None:
            template, salt = default, ""
        if not template:
            return self._model
        key = (salt, template)
        with self._lock:
            model = self._kept.get(key)
            if model is not None:
                self._kept.move_to_end(key)
                return model
        if len(template) > MAX_CHARACTERS:
            raise RequestError(
                f'field "template" has {len(template):,} characters; {MAX_CHARACTERS:,} is the '
                "limit"
            )
        try:
            model = self._model.with_template(template, origin="the request", most=MOST)
        except ModelFileError as error:
            raise RequestError(f"template error: {error}") from None
        with self._lock:
            self._kept[key] = model
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return model

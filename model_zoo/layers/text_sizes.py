"""The sizes of a text model, read from its metadata and checked."""

from dataclasses import dataclass

from model_zoo.gguf.metadata import MAX_LAYERS, Metadata
from runtime.kv.cache_kinds import CacheKind, Full, Sliding
from runtime.kv.cache_layout import LayerCache

MAX_HEAD_DIM = 4096


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Sizes that nearly every text model states; `heads` and `kv_heads` have an entry per layer.

    known_tokens: number of tokens in the file's vocabulary, None if it has none; matrices may have
    more rows.
    """

    metadata: Metadata
    layers: int
    hidden: int
    context_length: int
    eps: float
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_dim: int
    value_dim: int
    known_tokens: int | None

    @classmethod
    def read(
        cls,
        metadata: Metadata,
        *,
        eps: float | None = None,
        head_dim: int | None = None,
        heads: tuple[int, ...] | None = None,
        kv_heads: tuple[int, ...] | None = None,
        attends: bool = True,
    ) -> "TextSizes":
        """eps, head_dim: defaults; without them, the file must state `eps`, and `head_dim` is
        hidden / heads. heads, kv_heads: by layer, override the file. attends: False for models
        without attention, whose files state 0 heads; here they have one, with one element.

        Raises ModelFileError for missing or impossible sizes.
        """
        layers = metadata.require_size("block_count", at_most=MAX_LAYERS)
        hidden = metadata.require_size("embedding_length")
        if not attends:
            heads = kv_heads = (1,) * layers
        if heads is None:
            heads = metadata.require_per_layer("attention.head_count", layers)
        if kv_heads is None:
            kv_heads = metadata.get_per_layer("attention.head_count_kv", layers, heads)
        for key, counts in (("head_count", heads), ("head_count_kv", kv_heads)):
            if len(counts) != layers:
                raise metadata.error(f"attention.{key}", f"has {len(counts):,} entries")
        for number, shared in zip(heads, kv_heads, strict=True):
            if number % shared:
                raise metadata.error(
                    "attention.head_count_kv", f"is {shared}, which does not divide {number} heads"
                )
        default = head_dim or (hidden // heads[0] if attends else 1)
        return cls(
            metadata,
            layers,
            hidden,
            metadata.require_size("context_length"),
            metadata.get_positive("attention.layer_norm_rms_epsilon", eps),
            heads,
            kv_heads,
            metadata.get_size("attention.key_length", default, at_most=MAX_HEAD_DIM),
            metadata.get_size("attention.value_length", default, at_most=MAX_HEAD_DIM),
            metadata.length("tokenizer.ggml.tokens"),
        )

    @property
    def feed_forward(self) -> tuple[int, ...]:
        """The inner width of each layer's dense feed-forward; ModelFileError if the file states
        none."""
        return self._widths(at_least=1)

    @property
    def optional_feed_forward(self) -> tuple[int, ...]:
        """As `feed_forward`, with 0 for layers without one."""
        return self._widths(at_least=0)

    def suppressed_tokens(self, rows: int) -> tuple[int, ...]:
        """Tokens below `rows` that the model must not produce, such as those that end an image in
        prompts; ModelFileError if the file lists more than there are."""
        key = "tokenizer.ggml.suppress_tokens"
        if not rows or not self.metadata.has(key):
            return ()
        if (self.metadata.length(key) or 0) > rows:
            raise self.metadata.error(key, f"lists more than all {rows:,} tokens")
        listed = self.metadata.require_array(key, int)
        return tuple(sorted({token for token in listed if 0 <= token < rows}))

    def cache(self, layer: int, kind: CacheKind) -> LayerCache:
        """The cache of `layer`."""
        return LayerCache(kind, self.kv_heads[layer], self.key_dim, self.value_dim)

    def window(self, default: int = 0) -> CacheKind:
        """The kind of layers with a window; Full if the file states 0, or nothing without
        `default`."""
        key, metadata = "attention.sliding_window", self.metadata
        if not metadata.get(key, int, default):
            return Full()
        return Sliding(metadata.get_size(key, default))

    def sliding_layers(self, period: int, *, full: int = -1) -> tuple[bool, ...]:
        """For each layer, whether it has a window: as the file states, or all except one of every
        `period`.

        The file may state a period (0: every layer has a window) or a flag for each layer. `full`:
        the place of the layer without a window in a period; by default the last.
        """
        key, metadata = "attention.sliding_window_pattern", self.metadata
        if metadata.length(key) is None:
            period = metadata.get(key, int, period)
            if period < 0:
                raise metadata.error(key, f"is {period}; it must be 0 or more")
            layers = range(self.layers)
            return tuple(period == 0 or (layer - full) % period > 0 for layer in layers)
        flags = metadata.require_array(key, bool)
        if len(flags) != self._listed_layers(key):
            raise metadata.error(key, f"has {len(flags):,} entries for {self.layers:,} layers")
        return flags[: self.layers]

    def _widths(self, *, at_least: int) -> tuple[int, ...]:
        key = "feed_forward_length"
        stated = self.metadata.require_per_layer(key, self._listed_layers(key), at_least=at_least)
        return stated[: self.layers]

    def _listed_layers(self, key: str) -> int:
        """The number of layers that a list under `key` must have: without those that predict
        drafts, unless it is as long as the file with them."""
        stored = self.metadata.require_size("block_count")
        return stored if self.metadata.length(key) == stored else self.layers

    def cache_sources(self, sliding: tuple[bool, ...]) -> list[int]:
        """For each layer, the layer whose keys and values it uses.

        The last layers, as many as `attention.shared_kv_layers`, use those of the last layer before
        them of the same kind (with or without window).
        """
        key = "attention.shared_kv_layers"
        shared = self.metadata.get(key, int, 0)
        if not 0 <= shared < self.layers:
            raise self.metadata.error(
                key, f"is {shared:,}; it must be below the {self.layers:,} layers"
            )
        first = self.layers - shared
        last_of = {slides: layer for layer, slides in enumerate(sliding[:first])}
        if not set(sliding) <= set(last_of):
            raise self.metadata.error(key, f"is {shared:,}; no layer before has such keys")
        sources = [last_of[slides] for slides in sliding]
        sources[:first] = range(first)
        for heads, kv_heads in zip(self.heads, (self.kv_heads[i] for i in sources), strict=True):
            if heads % kv_heads:
                raise self.metadata.error(key, f"shares {kv_heads} keys among {heads} heads")
        return sources

    def cap(self, key: str, default: float = 0.0) -> float | None:
        """The bound of a softcap; `default` if the file states none, None if the bound is 0."""
        stated = self.metadata.get(key, float, default)
        return self.metadata.get_positive(key, default) if stated else None

"""Alternating updates (AltUp): a residual of several streams, of which a layer computes one."""

from dataclasses import replace

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.matmul import matmul
from runtime.kernels.pointwise import add_, contiguous, joined, scale_, softcap
from runtime.kernels.streams import corrected_streams_, match_rms_, mixed_streams
from runtime.quant.weight import Weight

# Lower bound of the mean square of a stream when it is scaled.
_LEAST = 1e-5


class AltUp:
    """Predicts all streams before a layer computes the active one, and corrects them after it.

    Baykal et al., "Alternating Updates for Efficient Transformers", with coefficients that depend
    on the active stream. x [tokens, streams, hidden].
    """

    def __init__(self, w: TensorScope, sizes: TextSizes, *, streams: int, active: int) -> None:
        self._streams, self._active = streams, active
        norm = w.rms_norm("altup_router_norm", sizes.eps, size=sizes.hidden)
        assert norm.weight is not None
        self._norm = RMSNorm(derived(lambda each: each / sizes.hidden, norm.weight), norm.eps)
        self._router = w.linear("altup_router", shape=(streams, sizes.hidden))
        self._predict = w.linear("altup_predict_coef", shape=(streams**2, streams))
        self._correct = w.linear("altup_correct_coef", shape=(streams, streams))

    def predicted(self, x: Tensor) -> Tensor:
        """Adds to each stream a mixture of all streams; a new tensor like x."""
        mixture = self._predict(self._modalities(x[:, self._active]))
        return mixed_streams(x, mixture.unflatten(1, (self._streams, self._streams)))

    def corrected(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Adds to each stream its share of the error of the prediction of the active stream.

        `computed` [tokens, hidden]: the active stream's value. `predicted` is overwritten.
        """
        shares = self._correct(self._modalities(computed))
        return corrected_streams_(predicted, computed, shares, active=self._active)

    def _modalities(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> float32 [tokens, streams], the inputs of the coefficients."""
        return softcap(self._router(self._norm(x.float())), 1.0)


class AltUpStreams:
    """Makes several streams of one by projections, and one of several as the mean of projections.

    Projections are scaled to the root mean square of the first stream.
    """

    def __init__(self, w: TensorScope, sizes: TextSizes, *, streams: int) -> None:
        shape = streams - 1, sizes.hidden, sizes.hidden
        self._apart = w.weight("altup_proj", shape=shape, tiled=True)
        self._together = w.weight("altup_unembd_proj", shape=shape, tiled=True)

    def spread(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, streams, hidden]."""
        streams = [x, *(self._like(matmul(x, weight), x) for weight in _slices(self._apart))]
        return joined(*(each.unsqueeze(1) for each in streams)).view(len(x), len(streams), -1)

    def gather(self, x: Tensor) -> Tensor:
        """x [tokens, streams, hidden] -> [tokens, hidden]."""
        result = joined(x[:, :1]).squeeze(1)
        for stream, weight in enumerate(_slices(self._together), start=1):
            own = matmul(contiguous(x[:, stream]), weight)
            result = add_(result, self._like(own, x[:, 0]))
        return scale_(result, 1 / x.shape[1])

    def _like(self, x: Tensor, other: Tensor) -> Tensor:
        """x [tokens, hidden], overwritten, scaled to the root mean square of `other`."""
        return match_rms_(x, other, least=_LEAST)


def _slices(weight: Weight) -> list[Weight]:
    """weight (n, out, in) -> n weights (out, in)."""
    return [replace(weight, data=data, shape=weight.shape[1:]) for data in weight.data]

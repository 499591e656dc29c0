"""Alternating updates: a residual of several streams, of which each layer computes one."""

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.sizes import Sizes
from runtime.kernels.matmul import matmul
from runtime.quant.block_types import Weight

# Least mean square that a stream is scaled by.
_LEAST = 1e-5


class AltUp:
    """What a layer makes of the streams before and after it computes the active one.

    Baykal et al., "Alternating Updates for Efficient Transformers", with coefficients that depend
    on the active stream. x [tokens, streams, hidden].
    """

    def __init__(self, w: TensorScope, sizes: Sizes, *, streams: int, active: int) -> None:
        self._streams, self._active = streams, active
        norm = w.rms_norm("altup_router_norm", sizes.eps, size=sizes.hidden)
        assert norm.weight is not None
        self._norm = RMSNorm(norm.weight / sizes.hidden, norm.eps)
        self._router = w.linear("altup_router", shape=(streams, sizes.hidden))
        self._predict = w.linear("altup_predict_coef", shape=(streams**2, streams))
        self._correct = w.linear("altup_correct_coef", shape=(streams, streams))

    def predicted(self, x: Tensor) -> Tensor:
        """Each stream and a mixture of all -> new, like x."""
        mixture = self._predict(self._modalities(x[:, self._active]))
        mixture = mixture.unflatten(1, (self._streams, self._streams))
        result = x.clone()
        for stream in range(self._streams):
            result.addcmul_(mixture[:, :, stream, None], x[:, stream, None])
        return result

    def corrected(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Each stream follows what was `computed` [tokens, hidden] for the active; overwritten."""
        error = computed - predicted[:, self._active]
        shares = self._correct(self._modalities(computed)).add_(1)
        return predicted.addcmul_(shares[:, :, None], error[:, None])

    def _modalities(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> float32 [tokens, streams], from which coefficients are computed."""
        return self._router(self._norm(x.float())).tanh_()


class Spread:
    """One stream becomes several, projections as large as itself."""

    def __init__(self, w: TensorScope, sizes: Sizes, *, streams: int) -> None:
        shape = streams - 1, sizes.hidden, sizes.hidden
        self._projections = w.weight("altup_proj", shape=shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, streams, hidden]."""
        others = [_as_large(matmul(x, weight), x) for weight in _slices(self._projections)]
        return torch.stack([x, *others], dim=1)


class Gathered:
    """Several streams become one, the mean of the first and of projections as large as it."""

    def __init__(self, w: TensorScope, sizes: Sizes, *, streams: int) -> None:
        self._streams = streams
        shape = streams - 1, sizes.hidden, sizes.hidden
        self._projections = w.weight("altup_unembd_proj", shape=shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, streams, hidden] -> [tokens, hidden]."""
        result = x[:, 0].clone()
        for stream, weight in enumerate(_slices(self._projections), start=1):
            result += _as_large(matmul(x[:, stream].contiguous(), weight), x[:, 0])
        return result.div_(self._streams)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """x [tokens, hidden], overwritten, with the root mean square of `other`."""
    own = x.float().square().mean(-1, keepdim=True).clamp_(min=_LEAST).sqrt_()
    wanted = other.float().square().mean(-1, keepdim=True).sqrt_()
    return x.mul_(wanted.div_(own))


def _slices(weight: Weight) -> list[Weight]:
    """weight (n, out, in) -> n of (out, in)."""
    return [Weight(data, weight.type, weight.shape[1:]) for data in weight.data]

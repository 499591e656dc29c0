"""Products of activations with the quantised matrices of each row's experts."""

import ctypes
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.matmul import SLAB_ELEMENTS, matmul
from runtime.kernels.native import address, library, row_address
from runtime.kernels.pointwise import contiguous
from runtime.kernels.triton.launch import has_kernels
from runtime.quant.weight import Weight, dequantize


def expert_products(
    x: Activations,
    weight: Weight,
    chosen: Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """x [tokens, in] or [tokens, used, in], weight (experts, out, in) -> [tokens, used, out].

    chosen [tokens, used] int64: the experts of each row; None for all in order. scale float32
    [tokens, used] multiplies the rows first; bias float32 (experts, out) is added. The result is in
    x's type. With C kernels it is computed in float32, the matrix of each used expert is read once,
    and the bits of a row do not depend on other rows.
    """
    # Other rows would be padded, for the matrices of all experts.
    tiled = weight.deterministic or weight.shape[-1] % 32 == 0
    if tiled and weight.by_triton and has_kernels(unrounded(x).device):
        from runtime.kernels.triton.products import experts_product

        chosen = _all_in_order(unrounded(x), weight) if chosen is None else chosen
        return experts_product(x, weight, chosen, bias=bias, scale=scale)
    x = unrounded(x)
    kernels = library() if x.device.type == "cpu" else None
    if kernels is None:
        return expert_products_twin(x, weight, chosen, bias=bias, scale=scale)
    wide = x.float().contiguous()
    if kernels.caravan_matmul_knows(weight.type.id, weight.compute):
        result = _products_cpu(kernels, wide, weight, chosen, bias, scale)
    else:
        chosen = _all_in_order(wide, weight) if chosen is None else chosen
        result = _products_expanded(wide, weight, chosen, bias, scale)
    return result.to(x.dtype)


def weighted_sum(
    x: Tensor, weights: Tensor | None, *, chosen: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """x [tokens, used, n], weights [tokens, used] -> [tokens, n] in x's type, summed in float32.

    Without weights they are 1. scales float32 [experts] also multiplies, by the experts `chosen`
    int64 [tokens, used]. Added in the order of the choices, so the bits of a row do not depend on
    other rows.
    """
    if x.device.type != "cpu" or (kernels := library()) is None:
        return weighted_sum_twin(x, weights, chosen=chosen, scales=scales)
    tokens, used, n = x.shape
    wide, pairs, experts = x.float().contiguous(), (tokens, used), 0
    factors = None if weights is None else weights.float().contiguous()
    choices = multiples = None
    if chosen is not None and scales is not None:
        experts, chosen = len(scales), chosen.contiguous()
        choices, multiples = address(chosen, pairs, torch.int64), address(scales, (experts,))
    result = torch.empty(tokens, n)
    if kernels.caravan_weighted_sum(
        address(wide, x.shape), None if factors is None else address(factors, pairs), choices,
        multiples, experts, tokens, used, n, result.data_ptr(), torch.get_num_threads(),
    ):  # fmt: skip
        raise ValueError(f"chosen experts must be below {experts}")
    return result.to(x.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float, slope: float) -> Tensor:
    """gate, up [..., n] -> g * sigmoid(slope * g) * (u + 1), in gate's type; in float32.

    g = min(gate, limit), u = clamp(up, -limit, limit); as in the model code of gpt-oss.
    """
    if gate.device.type != "cpu" or (kernels := library()) is None:
        return clamped_swiglu_twin(gate, up, limit=limit, slope=slope)
    return _clamped(kernels, gate, up, limit, slope, curved_first=False)


def limited_swiglu(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """gate, up [..., n] -> min(silu(gate), limit) * clamp(up, -limit, limit), in gate's type; in
    float32. As in the model code of Step 3.5."""
    if gate.device.type != "cpu" or (kernels := library()) is None:
        return limited_swiglu_twin(gate, up, limit=limit)
    return _clamped(kernels, gate, up, limit, 1.0, curved_first=True)


def expert_products_twin(
    x: Tensor,
    weight: Weight,
    chosen: Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The specification of `expert_products`: gathered blocks, a slab at a time, and `bmm`.

    Rows of the same expert form bundles of one size, each multiplied by the expert's matrix. Does
    not synchronise the device. The number of bundles is known on a CPU only; elsewhere it expands
    the largest possible number of matrices, at most twice the number of experts.
    """
    chosen = _all_in_order(x, weight) if chosen is None else chosen
    (tokens, used), (experts, outs, elements) = chosen.shape, weight.shape
    pairs, result = tokens * used, x.new_empty(tokens * used + 1, outs)
    rows, share = x.flatten(0, -2), used if x.dim() == 2 else 1
    size = _bundle_size(pairs, experts)
    experts_of, members = _bundles(chosen.flatten(), experts, size)
    factors = None if scale is None else scale.flatten().to(x.dtype)
    together = weight.type.interleaved_rows
    outs_at_once = min(outs, max(1, SLAB_ELEMENTS // (elements * together)) * together)
    bundles_at_once = max(1, SLAB_ELEMENTS // (outs_at_once * elements))
    for some, of in zip(
        members.split(bundles_at_once), experts_of.split(bundles_at_once), strict=True
    ):
        inside = some.clamp(max=pairs - 1)
        taken = rows[inside // share]
        taken = taken if factors is None else taken * factors[inside].unsqueeze(-1)
        for begin in range(0, outs, outs_at_once):
            some_outs = weight.outputs(begin, min(begin + outs_at_once, outs))
            blocks = some_outs.data.index_select(0, of)
            dense = dequantize(blocks, weight.type).to(x.dtype)
            products = torch.bmm(taken, dense.transpose(1, 2)).flatten(0, 1)
            result[:, begin : begin + outs_at_once].index_copy_(0, some.flatten(), products)
    result = result[:pairs].view(tokens, used, outs)
    return result if bias is None else result.add_(bias[chosen])


def weighted_sum_twin(
    x: Tensor, weights: Tensor | None, *, chosen: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """The specification of `weighted_sum`."""
    wide = x.float()
    if weights is not None:
        wide = wide * weights.float().unsqueeze(-1)
    if chosen is not None and scales is not None:
        wide = wide * scales[chosen].unsqueeze(-1)
    return wide.sum(dim=1).to(x.dtype)


def clamped_swiglu_twin(gate: Tensor, up: Tensor, *, limit: float, slope: float) -> Tensor:
    """The specification of `clamped_swiglu`."""
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (g * torch.sigmoid(slope * g) * (u + 1)).to(gate.dtype)


def limited_swiglu_twin(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """The specification of `limited_swiglu`."""
    curved, u = F.silu(gate.float()).clamp(max=limit), up.float().clamp(-limit, limit)
    return (curved * u).to(gate.dtype)


def _clamped(
    kernels: ctypes.CDLL,
    gate: Tensor,
    up: Tensor,
    limit: float,
    slope: float,
    *,
    curved_first: bool,
) -> Tensor:
    wide, other = contiguous(gate.float()), contiguous(up.float())
    result = torch.empty_like(wide)
    kernels.caravan_clamped_swiglu(
        address(wide, gate.shape), address(other, gate.shape), limit, slope, curved_first,
        wide.numel(), result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result.to(gate.dtype)


def _all_in_order(x: Tensor, weight: Weight) -> Tensor:
    """[tokens, experts] int64."""
    return torch.arange(weight.shape[0], device=x.device).expand(x.shape[0], -1)


def _bundle_size(pairs: int, experts: int) -> int:
    """The largest power of two up to the mean number of pairs per expert."""
    return 1 << max(0, (pairs // experts).bit_length() - 1)


def _most_bundles(pairs: int, experts: int, size: int) -> int:
    """Full bundles, and a partly filled one for each used expert."""
    return pairs // size + (min(experts, pairs) if size > 1 else 0)


def _bundles(chosen: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """chosen [pairs] -> the expert of each bundle [n] and its pairs [n, size].

    The value `pairs` marks unused entries. Empty bundles belong to the last used expert.
    """
    pairs, device = len(chosen), chosen.device
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    counts.index_add_(0, chosen, torch.ones_like(chosen))
    ends = ((counts + size - 1) // size).cumsum(0)
    begins = (ends - (counts + size - 1) // size) * size
    order = chosen.argsort(stable=True)
    expert = chosen[order]
    moved = begins - (counts.cumsum(0) - counts)
    place = moved[expert] + torch.arange(pairs, device=device)
    known = device.type == "cpu" and pairs > 0
    count = int(ends[-1]) if known else _most_bundles(pairs, experts, size)
    members = torch.full((count * size,), pairs, device=device)
    members[place] = order
    index = torch.arange(count, device=device).minimum(ends[-1] - 1)
    return torch.searchsorted(ends, index, right=True), members.view(count, size)


class _ExpertsJob(ctypes.Structure):
    """`caravan_experts_job` in cpu/experts.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "scales", "chosen", "weight", "bias", "y", "packed", "places",
        )),
        ("expert_bytes", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in (
            "type", "compute", "pairs", "share", "experts", "outs", "elements",
        )),
    )  # fmt: skip


def _products_cpu(
    kernels: ctypes.CDLL,
    x: Tensor,
    weight: Weight,
    chosen: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """x float32, contiguous."""
    experts, outs, elements = weight.shape
    tokens, used = (x.shape[0], experts) if chosen is None else chosen.shape
    pairs, data = tokens * used, weight.data
    rows = (tokens,) if x.dim() == 2 else (tokens, used)
    inputs = address(x, (*rows, elements))
    blocks = row_address(data, weight.type.data_shape(weight.shape), torch.uint8)
    result = torch.empty(tokens, used, outs)
    if not (pairs and outs):
        return result
    how = weight.type.id, weight.compute
    packed = torch.empty(kernels.caravan_packed_bytes(*how, pairs, elements), dtype=torch.uint8)
    places = torch.empty(kernels.caravan_experts_places(pairs, experts), dtype=torch.int32)
    scale = None if scale is None else scale.float().contiguous()
    chosen = None if chosen is None else chosen.contiguous()
    job = _ExpertsJob(
        inputs, None if scale is None else address(scale, (tokens, used)),
        None if chosen is None else address(chosen, (tokens, used), torch.int64), blocks,
        None if bias is None else address(bias, (experts, outs)), result.data_ptr(),
        packed.data_ptr(), places.data_ptr(), data.stride(0),
        data.stride(1) // weight.type.interleaved_rows, *how,
        pairs, used if x.dim() == 2 else 1, experts, outs, elements,
    )  # fmt: skip
    if kernels.caravan_experts(ctypes.byref(job), torch.get_num_threads()):
        raise ValueError(f"chosen experts must be below {experts}")
    return result


def _products_expanded(
    x: Tensor, weight: Weight, chosen: Tensor, bias: Tensor | None, scale: Tensor | None
) -> Tensor:
    """One used expert after the other, dequantised: for weights without a C kernel, as of
    integers and doubles."""
    tokens, used = chosen.shape
    rows, flat = x.flatten(0, -2), chosen.flatten()
    share, result = used if x.dim() == 2 else 1, torch.empty(tokens * used, weight.shape[1])
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        taken = rows[pairs // share]
        taken = taken if scale is None else taken * scale.flatten()[pairs].unsqueeze(-1)
        matrix = replace(weight, data=weight.data[expert], shape=weight.shape[1:])
        result[pairs] = matmul(taken, matrix)
    result = result.view(tokens, used, weight.shape[1])
    return result if bias is None else result.add_(bias[chosen])

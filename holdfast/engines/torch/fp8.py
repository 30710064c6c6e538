"""fp8 products for the decoder's linear layers (Micikevicius et al. 2022).

Activations and weights are e4m3, gradients e5m2, each tensor with one scale. The rest of `training.precision: fp8` is
bf16. A scale depends only on the tensor that it scales, so no state is saved. It is a power of two, so scaling rounds
nothing except values too small for fp8.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.model.decoder import Decoder
from holdfast.model.layers import Linear
from holdfast.spec.errors import MissingError
from holdfast.spec.rules.training import FP8_CAPABILITY

# The exponent of the largest power of two in each format, minus one: 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15.
_ROOM = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 14}
_BIAS, _MANTISSA = 127, 23  # of an fp32 number's bits


def require_fp8(device: torch.device) -> None:
    """Raises MissingError for a device without fp8 products."""
    actual = f"this device is {device.type}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= FP8_CAPABILITY:
            return
        actual = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    least = ".".join(map(str, FP8_CAPABILITY))
    raise MissingError(
        f"training.precision: fp8 needs an accelerator of CUDA capability {least} or more (Ada, Hopper, Blackwell), "
        f"and {actual}; use --set training.precision=bf16, which is another run, or nodes that have such accelerators"
    )


def quantised(tensor: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in an fp8 format, and the scale (fp32, no dimension) that restores it. The scale is the power of
    two that maps the largest number to the upper end of the format. It is NaN if a number is not finite, which e4m3
    cannot hold. Then every product of the tensor is NaN too."""
    largest = tensor.detach().abs().amax().float()
    exponent = (largest.view(torch.int32) >> _MANTISSA) - _ROOM[kind]  # biased exponent of the power of two below
    exponent = exponent.clamp(_BIAS - 100, _BIAS + 100)  # the scale and its inverse are normal numbers
    scale, inverse = ((bits << _MANTISSA).view(torch.float32) for bits in (exponent, 2 * _BIAS - exponent))
    return (tensor.float() * inverse).to(kind), torch.where(largest.isfinite(), scale, torch.nan)


class _Product(torch.autograd.Function):
    """x [M, K] times weight [N, K] transposed, with both gradients, in fp8. Results are bf16, and products are added
    in fp32. bf16 inputs are kept for the backward pass, as without fp8, and quantized again there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(quantised(x, torch.float8_e4m3fn), quantised(weight, torch.float8_e4m3fn))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        upstream, scale = quantised(gradient, torch.float8_e5m2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            narrow, its_scale = quantised(weight, torch.float8_e4m3fn)
            of_x = _multiply((upstream, scale), (narrow.t().contiguous(), its_scale))
        if ctx.needs_input_grad[1]:
            narrow, its_scale = quantised(x, torch.float8_e4m3fn)
            of_weight = _multiply((upstream.t().contiguous(), scale), (narrow.t().contiguous(), its_scale))
        return of_x, of_weight


def _multiply(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """left [A, C] times right [B, C] transposed. Rows of both are contiguous, as the kernels require."""
    (rows, its_scale), (columns, scale) = left, right
    return torch._scaled_mm(rows, columns.t(), scale_a=its_scale, scale_b=scale, out_dtype=torch.bfloat16)


class Fp8Linear(Linear):
    """A linear layer that multiplies in fp8, with the parameters of the layer that it replaces."""

    def __init__(self, base: Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in bf16."""
        rows = x.to(torch.bfloat16).flatten(0, -2)
        product: Tensor = _Product.apply(rows, self.weight.to(torch.bfloat16))
        result = product.unflatten(0, x.shape[:-1])
        return result if self.bias is None else result + self.bias.to(torch.bfloat16)


def convert_to_fp8(decoder: Decoder, precision: str) -> None:
    """Convert the linear layers of every decoder layer to fp8 if that is the precision. Embedding, norms and head
    are unchanged."""
    if precision != "fp8":
        return
    for layer in decoder.model.layers:
        for part in () if layer is None else list(layer.children()):  # a pipeline stage has only some layers
            for name, base in list(part.named_children()):
                if type(base) is Linear:
                    setattr(part, name, Fp8Linear(base))

"""Rules of :mod:`.aten` for operators over images and signals: convolution, batch norm, pooling.

A convolution is the product that it is as an implicit GEMM (cuDNN; Chetlur et al. 2014, arXiv 1410.0759, sec. 3): a row
for each output position, a column for each output channel, and what a kernel covers summed over. What its rows read
twice counts twice. Where each channel is convolved alone there is nothing to sum on matrix units.
"""

from __future__ import annotations

import math

from ...datasets.ops import Op
from .aten import may_be_empty, op_of, rule
from .calls import Call, View
from .layout import numel


@rule("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> Op | None:
    x, weight = call.inputs[:2]
    return _products(call, x, weight, call.outputs[0], 1)


@rule("convolution_backward", "convolution_backward_overrideable")
@may_be_empty
def _convolution_backward(call: Call) -> Op | None:
    """The input's gradient and the weight's, as many as are asked for: each has the arithmetic of the forward pass."""
    outputs, x, weight = call.inputs[:3]
    output_mask = call.arguments.get("output_mask") or (True, True, True)
    return _products(call, x, weight, outputs, max(sum(bool(flag) for flag in output_mask[:2]), 1))


def _products(call: Call, x: View, weight: View, out: View, count: int) -> Op:
    """``count`` products of a convolution's forward pass. A transposed one reads what a plain one writes."""
    groups = int(call.arguments.get("groups") or 1)
    spatial = x if call.arguments.get("transposed") else out
    m = numel(spatial) // spatial.shape[1]
    kernel_elements = math.prod(weight.shape[1:])
    if groups == spatial.shape[1] and weight.shape[1] == 1:
        return op_of("elementwise", x, out, numel=count * numel(out), inputs=1)
    n = weight.shape[0] // groups
    return op_of("gemm", x, out, batch=count * groups, m=m, n=n, k=kernel_elements, layout="nt")


@rule(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm"),
    *("native_group_norm", "instance_norm"),
)
@may_be_empty
def _batch_norm(call: Call) -> Op | None:
    """A norm over all positions of each channel: rows are channels."""
    return _channels("layer_norm", call.inputs[0], call.outputs[0])


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward", "native_group_norm_backward")
@may_be_empty
def _batch_norm_backward(call: Call) -> Op | None:
    return _channels("layer_norm_backward", call.inputs[1], call.outputs[0])


def _channels(kind: str, x: View, out: View) -> Op:
    return op_of(kind, x, out, rows=x.shape[1], cols=numel(x) // x.shape[1])


@rule(
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "mkldnn_max_pool2d"),
)
def _pool(call: Call) -> Op | None:
    """A reduction of as many inputs as an output has: windows that overlap read from the cache."""
    x, out = call.inputs[0], call.outputs[0]
    return op_of("reduce", x, out, outer=numel(out), length=max(numel(x) // numel(out), 1), inner=1)


@rule(
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward"),
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
)
def _pool_backward(call: Call) -> Op | None:
    gradient = call.outputs[0]
    return op_of("elementwise", gradient, numel=numel(gradient), inputs=1)

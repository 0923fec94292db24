"""The kernels of SyncBatchNorm, which PyTorch has for CUDA only, in terms of other operators.

Formulas: batch normalization, Ioffe and Szegedy 2015, section 3; statistics of
several ranks are joined as counts, means and variances.
"""

import torch


def _other_dims(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values, x):
    return values.view([1, -1] + [1] * (x.dim() - 2))


def batch_norm_stats(x, eps):
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    variance, mean = torch.var_mean(wide, _other_dims(x), unbiased=False)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    weight = counts.reshape(-1, 1).to(means.dtype)
    total = weight.sum()
    mean = (means * weight).sum(0) / total
    variance = ((1 / invstds**2 - eps + (means - mean) ** 2) * weight).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(momentum * variance * total / (total - 1))
    return mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    y = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None:
        y = y * _per_channel(weight, x)
    if bias is not None:
        y = y + _per_channel(bias, x)
    return y.to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    dims = _other_dims(x)
    sum_dy = grad.to(mean.dtype).sum(dims)
    sum_dy_xmu = (grad * (x - _per_channel(mean, x))).to(mean.dtype).sum(dims)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd if weight_g else None, sum_dy if bias_g else None


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    total = count.sum()
    factor = invstd if weight is None else invstd * weight
    centred = (x - _per_channel(mean, x)) * _per_channel(invstd**2 * sum_dy_xmu / total, x)
    return ((grad - _per_channel(sum_dy / total, x) - centred) * _per_channel(factor, x)).to(x.dtype)


_library = torch.library.Library("aten", "IMPL", "PrivateUse1")
for _kernel in (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
):
    _library.impl(_kernel.__name__, _kernel)

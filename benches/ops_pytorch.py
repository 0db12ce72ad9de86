"""PyTorch's side of benches/ops.rs: an operator and the shapes of its inputs, by serve_cases.py."""

from serve_cases import serve, torch

import torch.nn.functional as F  # after the check that PyTorch is there


def identity(x):
    """Places of all cells, `[batch, rows, columns, 2]`."""
    axes = (torch.linspace(-1, 1, size) for size in x.shape[2:])
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([columns, rows], -1).expand(x.shape[0], -1, -1, -1)


def sampled(x, displacement):
    scale = torch.tensor([2.0 / (size - 1) for size in reversed(x.shape[2:])])
    places = identity(x) + displacement.clamp(-2, 2).permute(0, 2, 3, 1).flip(-1) * scale
    return F.grid_sample(x, places, padding_mode="border", align_corners=True)


def variation(x):
    return (x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()).reshape(1, 1, 1, 1)


OPERATORS = {
    "add": lambda x, y: x + y,
    "gelu": lambda x: F.gelu(x),
    "softmax": lambda x: x.softmax(3),
    "log_softmax of channels": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(3, keepdim=True),
    "sum": lambda x: x.sum((2, 3), keepdim=True),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "max": lambda x: x.amax((2, 3), keepdim=True),
    "var": lambda x: x.var((2, 3), keepdim=True),
    "std": lambda x: x.std((2, 3), keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True),
    "cumsum": lambda x: x.cumsum(3),
    "topk": lambda x: x.topk(4).values,
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[3:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[3:]),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (31, 17)),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w, stride=2),
    "unfold": lambda x: F.unfold(x, 3, padding=1).unflatten(2, x.shape[2:]),
    "fold": lambda x: F.fold(x.flatten(2), x.shape[2:], 3, padding=1),
    "bilinear, doubled": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, (700, 300), mode="bicubic"),
    "area": lambda x: F.interpolate(x, (181, 97), mode="area"),
    "grid_sample": sampled,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "pad": lambda x: F.pad(x, (3, 3, 3, 3), mode="circular"),
    "roll": lambda x: x.roll((5, -7), (2, 3)),
    "flip": lambda x: x.flip((2, 3)),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "cat": lambda x, y: torch.cat([x, y], 2),
    "index_select": lambda x: x.index_select(2, torch.arange(511, -1, -1)),
    "matmul": torch.matmul,
    "einsum": lambda x, w: torch.einsum("bchw,coxy->bohw", x, w),
    "mse_loss": lambda x, y: F.mse_loss(x, y).reshape(1, 1, 1, 1),
    "total_variation": variation,
}


class Case:
    """The inputs of an operator, random, and what is run on them."""

    def __init__(self, operator, inputs):
        self.operator = OPERATORS[operator]
        self.leaves = [torch.randn(shape, requires_grad=True) for shape in inputs]
        self.cotangent = torch.randn_like(self.forward())

    @torch.no_grad()
    def forward(self):
        return self.operator(*self.leaves)

    def gradients(self):
        return torch.autograd.grad(self.operator(*self.leaves), self.leaves, self.cotangent)


serve(Case)

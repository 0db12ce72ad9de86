"""PyTorch's side of benches/ops: an operator and the shapes of its inputs, by serve_cases.py."""

import functools

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


def number(loss):
    return loss.reshape(1, 1, 1, 1)


def variation(x):
    return number(x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean())


def gradients(x, y):
    return number(sum(F.mse_loss(x.diff(dim=dim), y.diff(dim=dim)) for dim in (2, 3)))


def spectrum(x, y):
    x, y = (torch.fft.rfftn(field, dim=(2, 3), norm="ortho").abs() for field in (x, y))
    return number(F.mse_loss(x, y))


def ssim(x, y, reach=4.0, width=11, sigma=1.5):
    """Means of Gaussian windows, dim by dim."""
    channels = x.shape[1]
    places = torch.arange(width) - (width - 1) / 2
    window = torch.exp(-(places**2) / (2 * sigma**2))
    window = (window / window.sum()).repeat(5 * channels, 1)
    fields = torch.cat([x, y, x * x, y * y, x * y], 1)
    blurred = F.conv2d(fields, window[:, None, :, None], groups=5 * channels)
    means = F.conv2d(blurred, window[:, None, None, :], groups=5 * channels)
    mx, my, xx, yy, xy = means.chunk(5, 1)
    c1, c2 = (0.01 * reach) ** 2, (0.03 * reach) ** 2
    above = (2 * mx * my + c1) * (2 * (xy - mx * my) + c2)
    below = (mx * mx + my * my + c1) * (xx - mx * mx + yy - my * my + c2)
    return number((1 - above / below).mean())


@functools.cache
def edges(cells):
    steps = torch.tensor([1, cells - 1, 256, cells - 256, 257, cells - 257])
    targets = torch.arange(cells).repeat_interleave(len(steps))
    return (targets + steps.repeat(cells)) % cells, targets


def messages(x):
    sources, targets = edges(x.shape[2])
    return torch.zeros_like(x).index_add(2, targets, x.index_select(2, sources))


def parts(y):
    """Real and imaginary parts beside each other."""
    return torch.view_as_real(y).flatten(-2)


def whole(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def spectral_conv(x, weight):
    """Li et al.'s SpectralConv2d, with both of its weights in one tensor."""
    weight = whole(weight)
    rows, columns = weight.shape[2:]
    modes = torch.fft.rfft2(x)
    y = modes.new_zeros(x.shape[0], weight.shape[1], *modes.shape[2:])
    for part, of_weight in ((slice(None, rows // 2), slice(None, rows // 2)), (slice(-(rows // 2), None), slice(rows // 2, None))):
        y[:, :, part, :columns] = torch.einsum("bixy,ioxy->boxy", modes[:, :, part, :columns], weight[:, :, of_weight])
    return torch.fft.irfft2(y, s=x.shape[2:])


@functools.cache
def harmonics(name, rows, columns):
    import torch_harmonics

    return getattr(torch_harmonics, name)(rows, columns, grid="equiangular").float()


@functools.cache
def disco(channels, rows, columns):
    import torch_harmonics

    size = (rows, columns)
    return torch_harmonics.DiscreteContinuousConvS2(
        channels, channels, size, size, (3, 4), grid_in="equiangular", grid_out="equiangular", bias=False
    )


@functools.cache
def backwards(shape):
    """The places of a last dim in the opposite order."""
    return torch.arange(shape[3] - 1, -1, -1).expand(shape).contiguous()


@functools.cache
def geodesic(channels, rows, columns):
    import torch_harmonics

    size, grid = (rows, columns), "equiangular"
    layer = torch_harmonics.NeighborhoodAttentionS2(channels, size, size, grid, grid, 4, bias=False)
    weights = {f"{name}_weights": torch.eye(channels)[:, :, None, None] for name in ("q", "k", "v", "proj")}
    return layer, weights


def sphere_attention(q, k, v):
    """Between projections, which are the identity."""
    return torch.func.functional_call(*geodesic(*q.shape[1:]), (q, k, v))


def disco_conv(x, weight):
    return torch.func.functional_call(disco(*x.shape[1:]), {"weight": weight[0]}, (x,))


OPERATORS = {
    "add": lambda x, y: x + y,
    "relu": lambda x: F.relu(x),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "dropout": lambda x: F.dropout(x, 0.1),
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
    "cumsum of rows": lambda x: x.cumsum(2),
    "cumprod": lambda x: x.cumprod(3),
    "topk": lambda x: x.topk(4).values,
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[3:]),
    "layer_norm of two dims": lambda x: F.layer_norm(x, x.shape[2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[3:]),
    "weight_norm": lambda x, g: torch._weight_norm(x, g, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (31, 17)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (31, 17)),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w, stride=2),
    "conv_transpose2d, 16 channels": lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
    "unfold": lambda x: F.unfold(x, 3, padding=1).unflatten(2, x.shape[2:]),
    "fold": lambda x: F.fold(x.flatten(2), x.shape[2:], 3, padding=1),
    "nearest, doubled": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bilinear, doubled": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, (700, 300), mode="bilinear", align_corners=True),
    "bilinear, antialiased": lambda x: F.interpolate(x, (181, 97), mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, (700, 300), mode="bicubic"),
    "area": lambda x: F.interpolate(x, (181, 97), mode="area"),
    "grid_sample": sampled,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "pad": lambda x: F.pad(x, (3, 3, 3, 3), mode="circular"),
    "roll": lambda x: x.roll((5, -7), (2, 3)),
    "flip": lambda x: x.flip((2, 3)),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "shift": lambda x: torch.cat([x[:, :, :1].expand(-1, -1, 3, -1), x[:, :, :-3]], 2),
    "slice": lambda x: x[..., 1:512:2].contiguous(),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "cat of rows": lambda x, y: torch.cat([x, y], 2),
    "stack": lambda x, y: torch.stack([x, y], 1).flatten(1, 2),
    "gather": lambda x: x.gather(3, backwards(x.shape)),
    "scatter_add": lambda x, y: x.scatter_add(3, backwards(x.shape), y),
    "index_select": lambda x: x.index_select(3, torch.arange(511, -1, -1)),
    "tril": lambda x: x.tril(),
    "matmul": torch.matmul,
    "linear": lambda x, w: torch.matmul(x, w[0, 0]),
    "einsum": lambda x, w: torch.einsum("bchw,coxy->bohw", x, w),
    "mse_loss": lambda x, y: number(F.mse_loss(x, y)),
    "l1_loss": lambda x, y: number(F.l1_loss(x, y)),
    "huber_loss": lambda x, y: number(F.huber_loss(x, y)),
    "total_variation": variation,
    "gradient_loss": gradients,
    "ssim_loss": ssim,
    "spectral_loss": spectrum,
    "message_passing": messages,
    "message_passing, 64 features": messages,
    "rfft": lambda x: parts(torch.fft.rfft(x)),
    "rfft2": lambda x: parts(torch.fft.rfft2(x)),
    "rfft2, 721 x 1440": lambda x: parts(torch.fft.rfft2(x)),
    "irfft2": lambda x: torch.fft.irfft2(whole(x), s=(512, 512)),
    "fft2": lambda x: parts(torch.fft.fft2(whole(x))),
    "ifft2": lambda x: parts(torch.fft.ifft2(whole(x))),
    "spectral_conv": spectral_conv,
    "sht": lambda x: parts(harmonics("RealSHT", *x.shape[2:])(x)),
    "isht": lambda x: harmonics("InverseRealSHT", 721, 1440)(whole(x)),
    "vector_sht": lambda x: parts(harmonics("RealVectorSHT", *x.shape[2:])(x)),
    "vector_isht": lambda x: harmonics("InverseRealVectorSHT", 361, 720)(whole(x)),
    "sphere_attention": sphere_attention,
    "disco_conv": disco_conv,
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


def make(operator, inputs):
    if operator not in OPERATORS:
        return None
    try:
        return Case(operator, inputs)
    except ImportError as error:
        # Not installed, or built for another PyTorch.
        if "torch_harmonics" not in f"{error.name} {error.path}":
            raise
        return None


serve(make)

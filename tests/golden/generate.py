"""Makes golden cases, and checks that those in a folder are what PyTorch computes.

    pip install torch numpy safetensors torch-harmonics
    python tests/golden/generate.py check tests/golden
    python tests/golden/generate.py new conv2d --inputs x=1,3,13,9 --params weight=4,3,3,5 bias=4 \\
        --attrs '{"stride": [1, 2], "padding": [1, 2], "dilation": [1, 1], "groups": 1, "padding_mode": "circular"}'

    python tests/golden/generate.py fill FOLDER

`fill` adds results to cases that have none, such as those that the test `random` writes, and removes those whose
library is not installed. `new` draws inputs, parameters and the cotangent in f32, computes the result and all gradients in f64 on one device, and
writes the next free tests/golden/<op>_<nn>.safetensors. An input `index=2,5<7` is of indices below 7, `index=2,5<7!` of such that differ in each line, `var=4+` of
positive numbers, and `grid=2,5,7,2@0.3` of places near those of the cells. README.md beside this
file has the format.
"""

import argparse
import json
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

TOLERANCES = {"rtol": "0.0001", "atol": "1e-05"}


def conv(dims):
    function = [F.conv1d, F.conv2d, F.conv3d][dims - 1]

    def run(a, x, weight, bias=None):
        padding = a["padding"]
        if padding == "same":
            both = [d * (k - 1) for d, k in zip(a["dilation"], weight.shape[2:])]
            sides = [width for b in reversed(both) for width in (b // 2, b - b // 2)]
            mode = {"zeros": "constant"}.get(a["padding_mode"], a["padding_mode"])
            x, padding = F.pad(x, sides, mode=mode), 0
        elif a["padding_mode"] != "zeros":
            sides = [width for width in reversed(padding) for _ in range(2)]
            x, padding = F.pad(x, sides, mode=a["padding_mode"]), 0
        return function(x, weight, bias, a["stride"], padding, a["dilation"], a["groups"])

    return run


def conv_transpose(dims):
    function = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][dims - 1]

    def run(a, x, weight, bias=None):
        if a.get("padding_mode", "zeros") == "zeros":
            return function(
                x, weight, bias, a["stride"], a["padding"], a["output_padding"], a["groups"], a["dilation"]
            )
        # All parts of windows, added up around the dims.
        y = function(x, weight, None, a["stride"], 0, 0, a["groups"], a["dilation"])
        for dim, (stride, padding) in enumerate(zip(a["stride"], a["padding"]), 2):
            size = x.shape[dim] * stride
            turns = -(-y.shape[dim] // size)
            zeros = y.new_zeros(*y.shape[:dim], turns * size - y.shape[dim], *y.shape[dim + 1 :])
            y = torch.cat([y, zeros], dim).unflatten(dim, (turns, size)).sum(dim).roll(-padding, dim)
        return y if bias is None else y + bias.reshape(-1, *[1] * dims)

    return run


def max_pool(dims):
    function = [F.max_pool1d, F.max_pool2d, F.max_pool3d][dims - 1]
    return lambda a, x: function(
        x, a["kernel_size"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"]
    )


def avg_pool(dims):
    function = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][dims - 1]
    return lambda a, x: function(
        x, a["kernel_size"], a["stride"], a["padding"], a["ceil_mode"], a["count_include_pad"]
    )


def lp_pool(dims):
    function = getattr(F, f"lp_pool{dims}d")
    sizes = lambda list: list[0] if dims == 1 else list
    return lambda a, x: function(
        x, a["norm_type"], sizes(a["kernel_size"]), sizes(a["stride"]), a["ceil_mode"]
    )


def adaptive_pool(kind, dims):
    function = getattr(F, f"adaptive_{kind}_pool{dims}d")
    return lambda a, x: function(x, a["output_size"])


def interpolate(a, x):
    corners, antialias = a["align_corners"], a.get("antialias", False)
    size, around = a.get("output_size"), a.get("padding_mode") == "circular"
    # Nearest cells and areas lie in the field.
    if around and a["mode"] not in ("nearest", "nearest-exact", "area"):
        # The middle one of five copies, which a kernel as wide as the field does not leave.
        x = x.repeat(1, 1, *[5] * len(size))
        y = interpolate({**a, "output_size": [5 * n for n in size], "padding_mode": "replicate"}, x)
        for dim, n in enumerate(size, 2):
            y = y.narrow(dim, 2 * n, n)
        return y
    return F.interpolate(
        x, size, a.get("scale_factor"), mode=a["mode"], align_corners=corners, antialias=antialias
    )


def pad(a, x):
    value = a["value"] if a["value"] is not None else 0.0
    sides = [a[key] for key in ("pad_w", "pad_h", "pad_d") if key in a]
    return F.pad(x, sum(sides, []), mode=a["mode"], value=value)


def batch_norm(a, x, weight=None, bias=None, running_mean=None, running_var=None):
    given = [None if moment is None else moment.detach() for moment in (running_mean, running_var)]
    return F.batch_norm(x, *given, weight, bias, a["training"], eps=a["eps"])


def cross_entropy(a, logits, target, class_weight=None):
    return F.cross_entropy(
        logits,
        target,
        None if class_weight is None else class_weight.detach(),
        ignore_index=a.get("ignore_index", -100),
        reduction=a["reduction"],
        label_smoothing=a.get("label_smoothing", 0.0),
    )


def dense(a, q, k, v):
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=a["is_causal"], scale=a.get("scale"))


def neighborhood(a, q, k, v):
    """By a mask of every pair of cells: [batch, *spatial, heads, width]."""
    shape, shared = q.shape[1:-2], q.shape[-2] // k.shape[-2]
    mask = torch.ones(1, 1, dtype=torch.bool)
    options = (a["kernel_size"], a["dilation"], a["stride"], a["is_causal"], a.get("periodic", [False] * len(shape)))
    for size, kernel, dilation, stride, causal, periodic in zip(shape, *options):
        allowed = torch.zeros(size, size, dtype=torch.bool)
        for i in range(size):
            group, j = i % dilation, i // dilation
            count = -(-(size - group) // dilation)
            leader = j // stride * stride + (stride - 1 if causal else stride // 2)
            if causal:
                first, end = max(min(leader, count - 1) - kernel + 1, 0), j + 1
            else:
                first = leader - kernel // 2
                if not periodic:
                    first = min(max(min(leader, count - 1) - kernel // 2, 0), count - kernel)
                end = first + kernel
            allowed[i, [group + dilation * (u % count) for u in range(first, end)]] = True
        mask = (mask[:, None, :, None] & allowed[None, :, None, :]).flatten(2).flatten(0, 1)
    q, k, v = (x.flatten(1, -3).transpose(1, 2) for x in (q, k, v))  # [batch, heads, cells, width]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=a["scale"])
    return y.transpose(1, 2).unflatten(1, shape)


def unfold(a, x):
    """With the windows in spatial dims of their own."""
    sizes = zip(x.shape[2:], *(a[key] for key in ("padding", "dilation", "kernel_size", "stride")))
    windows = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in sizes]
    y = F.unfold(x, a["kernel_size"], a["dilation"], a["padding"], a["stride"])
    return y.unflatten(-1, windows)


def fold(a, x):
    options = (a["kernel_size"], a["dilation"], a["padding"], a["stride"])
    return F.fold(x.flatten(-2), a["output_size"], *options)


def shift(x, dim, offset, mode):
    size = x.shape[dim]
    places = torch.arange(size) + offset
    inside = (0 <= places) & (places < size)
    if mode == "reflect":
        places = (places % (2 * size - 2)).where(places % (2 * size - 2) < size, -places % (2 * size - 2))
    y = x.index_select(dim, places % size if mode == "circular" else places.clamp(0, size - 1))
    return y.movedim(dim, -1).where(inside, 0.0).movedim(-1, dim) if mode == "constant" else y


def differences(a, x, loss):
    """The loss of the differences along dims, of which a dim that ends has one fewer than cells."""
    total = 0.0
    for dim in a["dims"]:
        y = loss(shift(x, dim, 1, a["mode"]) - x)
        if a["mode"] == "replicate":
            y = y.narrow(dim, 0, y.shape[dim] - 1)
        total = total + (y.sum() if a["reduction"] == "sum" else y.mean())
    return total


def ssim(a, x, target):
    def blur(x):
        for dim, (width, window) in enumerate(zip(a["padding"], a["window"])):
            offsets = torch.arange(window, dtype=x.dtype) - (window - 1) / 2
            kernel = torch.exp(-((offsets / a["sigma"]) ** 2) / 2)
            x = x.movedim(dim + 2, -1)
            shape = x.shape
            x = F.pad(x.reshape(-1, 1, shape[-1]), [width, width], mode="circular")
            x = F.conv1d(x, (kernel / kernel.sum())[None, None])
            x = x.reshape(*shape[:-1], -1).movedim(-1, dim + 2)
        return x

    c1, c2 = ((k * a["data_range"]) ** 2 for k in (0.01, 0.03))
    mx, mt = blur(x), blur(target)
    vx, vt, covariance = blur(x * x) - mx**2, blur(target * target) - mt**2, blur(x * target) - mx * mt
    map = (2 * mx * mt + c1) * (2 * covariance + c2) / ((mx**2 + mt**2 + c1) * (vx + vt + c2))
    return (1 - map).sum() if a["reduction"] == "sum" else (1 - map).mean()


def message_passing(a, x):
    sources, targets = (torch.tensor(a[end]) for end in ("sources", "targets"))
    index = targets.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:])
    return torch.zeros_like(x).scatter_reduce(0, index, x[sources], a["reduce"], include_self=False)


def irfft(a, x):
    sizes = [x.shape[dim] for dim in a["dim"][:-1]] + [a["n"]]
    return torch.fft.irfftn(torch.view_as_complex(x), sizes, a["dim"], a["norm"])


def complex_fft(function):
    return lambda a, x: torch.view_as_real(
        function(torch.view_as_complex(x), dim=a["dim"], norm=a["norm"])
    )


def cosines(inverse):
    """By matrices: SciPy's dctn and idctn of type II."""

    def run(a, x):
        for dim in a["dim"]:
            n = x.shape[dim]
            k, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
            matrix = 2 * torch.cos(torch.pi * k * (2 * j + 1) / (2 * n))
            scales = {"backward": 1.0, "ortho": (2 * n) ** -0.5, "forward": 1 / (2 * n)}
            matrix = matrix * scales[a["norm"]]
            if a["norm"] == "ortho":
                matrix[0] *= 0.5**0.5
            matrix = torch.linalg.inv(matrix) if inverse else matrix
            x = (x.movedim(dim, -1) @ matrix.T).movedim(-1, dim)
        return x

    return run


def spectral_conv(_, x, weight):
    """The kernel of fourier_2d.py, with both of its weights in one, for any number of dims."""
    weight = torch.view_as_complex(weight)
    dims, sizes = list(range(2, x.ndim)), x.shape[2:]
    modes = torch.fft.rfftn(x, dim=dims)[..., : weight.shape[-1]]
    for dim, (size, kept) in enumerate(zip(sizes[:-1], weight.shape[2:-1]), 2):
        low, high = (kept + 1) // 2, kept // 2
        index = torch.cat([torch.arange(low), torch.arange(size - high, size)])
        modes = modes.index_select(dim, index)
    found = torch.einsum("bi...,io...->bo...", modes, weight)
    for dim, (size, kept) in enumerate(zip(sizes[:-1], weight.shape[2:-1]), 2):
        low, high = (kept + 1) // 2, kept // 2
        zeros = found.new_zeros([*found.shape[:dim], size - kept, *found.shape[dim + 1 :]])
        found = torch.cat([found.narrow(dim, 0, low), zeros, found.narrow(dim, low, high)], dim)
    return torch.fft.irfftn(found, s=sizes, dim=dims)


def spectral_conv2d(_, x, wr, wi):
    return spectral_conv(None, x, torch.stack([wr, wi], -1))


def spherical(name):
    def run(a, x):
        import torch_harmonics

        make = getattr(torch_harmonics, name)
        # Its tables are in f64.
        options = (a["nlat"], a["nlon"], a.get("lmax"), a.get("mmax"), a["grid"], a["norm"], a["csphase"])
        transform = make(*options).double()
        inverse = name.startswith("Inverse")
        y = transform(torch.view_as_complex(x) if inverse else x)
        return y if inverse else torch.view_as_real(y)

    return run


def sphere_conv(a, x, weight):
    """torch-harmonics' SpectralConvS2 with one group."""
    harmonics = spherical("RealSHT")(a, x)
    found = torch.einsum("bixy,iox->boxy", torch.view_as_complex(harmonics), torch.view_as_complex(weight[..., 0, :]))
    return spherical("InverseRealSHT")(a, torch.view_as_real(found))


def regrid(a, x):
    import torch_harmonics

    grids = (a["grid"], a.get("grid_out", a["grid"]))
    mode = a.get("mode", "bilinear")
    return torch_harmonics.ResampleS2(*a["in_shape"], *a["out_shape"], *grids, mode).double()(x)


def disco_conv(a, x, weight, bias=None, name="DiscreteContinuousConvS2"):
    import torch_harmonics

    layer = getattr(torch_harmonics, name)(
        x.shape[1], weight.shape[0], *(tuple(a[key]) for key in ("in_shape", "out_shape", "kernel_shape")),
        groups=a["groups"], grid_in=a["grid"], grid_out=a.get("grid_out", a["grid"]), theta_cutoff=a.get("theta_cutoff"), bias=False,
        basis_type=a.get("basis_type", "piecewise linear"), basis_norm_mode=a.get("basis_norm_mode", "nodal"),
    ).double()  # fmt: skip
    y = torch.func.functional_call(layer, {"weight": weight}, (x,))
    return y if bias is None else y + bias[:, None, None]


def disco_conv_transpose(a, x, weight, bias=None):
    return disco_conv(a, x, weight, bias, "DiscreteContinuousConvTransposeS2")


def sphere_attention(a, q, k, v):
    """Between projections, which are the identity."""
    import torch_harmonics

    layer = torch_harmonics.NeighborhoodAttentionS2(
        q.shape[1], k.shape[2:], q.shape[2:], a["grid"], a.get("grid_out", a["grid"]), a["num_heads"], bias=False,
        theta_cutoff=a.get("theta_cutoff"), out_channels=v.shape[1], optimized_kernel=False,
    ).double()  # fmt: skip
    identity = lambda x: torch.eye(x.shape[1], dtype=x.dtype)[:, :, None, None]
    names = {"q_weights": q, "k_weights": k, "v_weights": v, "proj_weights": v}
    weights = {name: identity(x) for name, x in names.items()}
    return torch.func.functional_call(layer, weights, (q, k, v))


# From the name of an operator to its result from `attrs`, inputs and parameters by name.
OPERATORS = {
    **{f"conv{n}d": conv(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": conv_transpose(n) for n in (1, 2, 3)},
    **{f"max_pool{n}d": max_pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": adaptive_pool("avg", n) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": adaptive_pool("max", n) for n in (1, 2, 3)},
    **{f"lp_pool{n}d": lp_pool(n) for n in (1, 2, 3)},
    "unfold": unfold,
    "fold": fold,
    **dict.fromkeys(("interpolate1d", "interpolate2d", "interpolate3d"), interpolate),
    "grid_sample": lambda a, x, grid: F.grid_sample(
        x, grid, a["mode"], a["padding_mode"], a["align_corners"]
    ),
    "pixel_shuffle": lambda a, x: F.pixel_shuffle(x, a["upscale_factor"]),
    "pixel_unshuffle": lambda a, x: F.pixel_unshuffle(x, a["downscale_factor"]),
    **dict.fromkeys(("pad1d", "pad2d", "pad3d"), pad),
    "slice": lambda a, x: x.movedim(a["dim"], 0)[a["start"] : a.get("end") : a["step"]].movedim(0, a["dim"]),
    "cat": lambda a, **parts: torch.cat(list(parts.values()), a["dim"]),
    "stack": lambda a, **parts: torch.stack(list(parts.values()), a["dim"]),
    # Joined again in the opposite order.
    "split": lambda a, x: torch.cat(x.split(a["sizes"], a["dim"])[::-1], a["dim"]),
    "chunk": lambda a, x: torch.cat(x.chunk(a["chunks"], a["dim"])[::-1], a["dim"]),
    "select": lambda a, x: x.select(a["dim"], a["index"]),
    "index_select": lambda a, x: x.index_select(a["dim"], torch.tensor(a["index"])),
    "gather": lambda a, x, index: x.gather(a.get("dim", -1), index),
    "scatter_add": lambda a, x, index, values: x.scatter_add(a.get("dim", -1), index, values),
    "scatter": lambda a, x, index, values: x.scatter(a.get("dim", -1), index, values),
    "unsqueeze": lambda a, x: x.unsqueeze(a["dim"]),
    "squeeze": lambda a, x: x.squeeze(a["dim"]),
    "reshape": lambda a, x: x.reshape(a["shape"]),
    "expand": lambda a, x: x.expand(a["size"]),
    "repeat": lambda a, x: x.repeat(a["repeats"]),
    "tril": lambda a, x: x.tril(a["diagonal"]),
    "triu": lambda a, x: x.triu(a["diagonal"]),
    "permute": lambda a, x: x.permute(a["dims"]),
    "flatten": lambda a, x: x.flatten(a.get("start_dim", -2), a.get("end_dim", -1)),
    "roll2d": lambda a, x: torch.roll(x, a["shifts"], a["dims"]),
    "flip2d": lambda a, x: torch.flip(x, a["dims"]),
    "shift": lambda a, x: shift(x, a["dim"], a["offset"], a["mode"]),
    "cumsum": lambda a, x: torch.cumsum(x, a["dim"]),
    "cumprod": lambda a, x: torch.cumprod(x, a["dim"]),
    "argmax": lambda a, x: x.argmax(a["dim"], keepdim=a.get("keepdim", True)),
    "argmin": lambda a, x: x.argmin(a["dim"], keepdim=a.get("keepdim", True)),
    "topk": lambda a, x: x.topk(a["k"], a.get("dim", -1)).values,
    "sum": lambda a, x: x.sum(a["dims"], a["keepdim"]),
    "mean": lambda a, x: x.mean(a["dims"], a["keepdim"]),
    "max": lambda a, x: torch.amax(x, a["dims"], a["keepdim"]),
    "min": lambda a, x: torch.amin(x, a["dims"], a["keepdim"]),
    "var": lambda a, x: x.var(a["dims"], correction=a["correction"], keepdim=a["keepdim"]),
    "std": lambda a, x: x.std(a["dims"], correction=a["correction"], keepdim=a["keepdim"]),
    "vector_norm": lambda a, x: torch.linalg.vector_norm(
        x, a["ord"], a.get("dims"), keepdim=a.get("keepdim", "dims" in a)
    ),
    "logsumexp": lambda a, x: torch.logsumexp(x, a["dims"], a["keepdim"]),
    "relu": lambda _, x: F.relu(x),
    "gelu": lambda _, x: F.gelu(x),
    "silu": lambda _, x: F.silu(x),
    "prelu": lambda _, x, weight: F.prelu(x, weight),
    "addcmul": lambda _, x, other, scale: torch.addcmul(x, other, scale),
    "softmax": lambda a, x: torch.softmax(x, a["dim"]),
    "log_softmax": lambda a, x: torch.log_softmax(x, a["dim"]),
    "matmul": lambda _, a, b: a @ b,
    "einsum": lambda a, x, w: torch.einsum(a["equation"], x, w),
    "message_passing": message_passing,
    "embedding": lambda _, index, weight: F.embedding(index, weight),
    "linear": lambda _, x, weight, bias=None: F.linear(x, weight, bias),
    "linear_row_col_mlp": lambda _, x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2),
    "group_norm": lambda a, x, weight=None, bias=None: F.group_norm(
        x, a["num_groups"], weight, bias, a["eps"]
    ),
    "instance_norm": lambda a, x, weight=None, bias=None: F.instance_norm(
        x, weight=weight, bias=bias, eps=a["eps"]
    ),
    "batch_norm": batch_norm,
    "weight_norm": lambda a, v, g: torch._weight_norm(v, g, -1 if a["dim"] is None else a["dim"]),
    "layer_norm": lambda a, x, weight=None, bias=None: F.layer_norm(
        x, a["normalized_shape"], weight, bias, a["eps"]
    ),
    "rms_norm": lambda a, x, weight=None: F.rms_norm(x, a["normalized_shape"], weight, a["eps"]),
    "scaled_dot_product_attention": dense,
    **{f"na{n}d": neighborhood for n in (1, 2, 3)},
    **dict.fromkeys(("cross_entropy", "cross_entropy_spatial"), cross_entropy),
    **{
        f"{name}_loss": lambda a, x, target, weight=None, loss=getattr(F, f"{name}_loss"): loss(
            x, target, weight=None if weight is None else weight.detach(), **a
        )
        for name in ("mse", "l1", "huber")
    },
    "binary_cross_entropy_with_logits": lambda a, x, target: F.binary_cross_entropy_with_logits(
        x, target, pos_weight=torch.tensor(a["pos_weight"]).view(-1, *[1] * (x.dim() - 2)), reduction=a["reduction"]
    ),
    "gaussian_nll_loss": lambda a, x, target, var: F.gaussian_nll_loss(x, target, var, **a),
    "total_variation": lambda a, x: differences(a, x, torch.abs),
    "gradient_loss": lambda a, x, target: differences(a, x - target, torch.square),
    "ssim_loss": ssim,
    "spectral_loss": lambda a, x, target: F.mse_loss(
        *(torch.fft.rfftn(part, dim=a["dim"], norm="ortho").abs() for part in (x, target)),
        reduction=a["reduction"],
    ),
    "rfft": lambda a, x: torch.view_as_real(torch.fft.rfftn(x, dim=a["dim"], norm=a["norm"])),
    "irfft": irfft,
    "fft": complex_fft(torch.fft.fftn),
    "ifft": complex_fft(torch.fft.ifftn),
    "dct": cosines(inverse=False),
    "idct": cosines(inverse=True),
    "spectral_conv": spectral_conv,
    "spectral_conv2d": spectral_conv2d,
    "rfft2_power": lambda _, x: torch.fft.rfft2(x, norm="ortho").abs().square(),
    "sht": spherical("RealSHT"),
    "isht": spherical("InverseRealSHT"),
    "sphere_conv": sphere_conv,
    "regrid": regrid,
    "disco_conv": disco_conv,
    "disco_conv_transpose": disco_conv_transpose,
    "sphere_attention": sphere_attention,
    "vector_sht": spherical("RealVectorSHT"),
    "vector_isht": spherical("InverseRealVectorSHT"),
}


def run(op, attrs, leaves, cotangent):
    """Result and gradients in f64; the cotangent is drawn if there is none."""
    wide = {name: leaf.double().requires_grad_() for name, leaf in leaves.items() if leaf.is_floating_point()}
    y = OPERATORS[op](attrs, **{name: wide.get(name, leaf) for name, leaf in leaves.items()})
    if cotangent is None:
        cotangent = torch.randn(y.shape)
    if not y.requires_grad:
        return {"y": y}, cotangent
    gradients = torch.autograd.grad(y, list(wide.values()), cotangent.double(), allow_unused=True)
    found = {f"grad_{name}": gradient for name, gradient in zip(wide, gradients) if gradient is not None}
    return {"y": y.detach(), **found}, cotangent


def cases(folder):
    """Files, with metadata, tensors, and the names of inputs and parameters."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as case:
            metadata = case.metadata()
            tensors = {name: case.get_tensor(name) for name in case.keys()}
        yield file, metadata, tensors, json.loads(metadata["inputs"]) + json.loads(metadata["params"])


def save(file, tensors, metadata):
    narrow = lambda tensor: tensor.float() if tensor.is_floating_point() else tensor
    save_file({name: narrow(tensor).contiguous() for name, tensor in tensors.items()}, file, metadata)


def fill(folder):
    """Cases without a result, of libraries that are not installed, are removed. The cotangent follows from the name of
    the file, so that a case can be repeated."""
    for file, metadata, tensors, _ in cases(folder):
        torch.manual_seed(zlib.crc32(file.name.encode()))
        try:
            results, cotangent = run(metadata["op"], json.loads(metadata["attrs"]), tensors, None)
        except ModuleNotFoundError as error:
            if "y" in tensors:
                raise
            print(f"{file.name}: without {error.name} there is no {metadata['op']}")
            file.unlink()
            continue
        save(file, {**tensors, **results, "gy": cotangent}, metadata)


def check(folder):
    failed = count = 0
    for file, metadata, tensors, names in cases(folder):
        count += 1
        leaves = {name: tensors[name] for name in names}
        found, _ = run(metadata["op"], json.loads(metadata["attrs"]), leaves, tensors["gy"])
        for name, expected in tensors.items():
            if name not in ("y", *(f"grad_{leaf}" for leaf in names)):
                continue
            off = (found[name] - expected.double()).abs().max()
            # Rounded to f32 once.
            if not off <= 2**-23 * expected.double().abs().max():
                failed += 1
                print(f"{file.name}: {name} is off by {off:.1e}")
    print(f"{count} cases, {failed} failed")
    return failed


def draw(text):
    """Normal numbers of a shape, `2,3`; positive ones, `2,3+`; indices below a bound, `2,3<7`, or `2,3<7!` where they differ in each line; places
    near those of all cells, `2,5,7,2@0.3`."""
    shape, _, spread = text.partition("@")
    if spread:
        batch, *cells, _ = (int(n) for n in shape.split(","))
        axes = torch.meshgrid(*(torch.linspace(-1, 1, size) for size in cells), indexing="ij")
        grid = torch.stack(axes[::-1], -1)[None].repeat(batch, *[1] * (len(cells) + 1))
        return grid + float(spread) * (2 * torch.rand(grid.shape) - 1)
    if text.endswith("+"):
        return torch.rand([int(n) for n in text[:-1].split(",")]) + 0.5
    shape, _, bound = text.partition("<")
    shape = [int(n) for n in shape.split(",")]
    if bound.endswith("!"):
        return torch.rand(*shape[:-1], int(bound[:-1])).argsort(-1)[..., : shape[-1]]
    return torch.randint(int(bound), shape) if bound else torch.randn(shape)


def new(arguments):
    torch.manual_seed(arguments.seed)
    attrs = json.loads(arguments.attrs)
    shapes = dict(text.split("=") for text in arguments.inputs + arguments.params)
    leaves = {name: draw(shape) for name, shape in shapes.items()}
    results, cotangent = run(arguments.op, attrs, leaves, None)
    names = [[text.split("=")[0] for text in group] for group in (arguments.inputs, arguments.params)]
    metadata = {
        "op": arguments.op,
        "attrs": json.dumps(attrs),
        "inputs": json.dumps(names[0]),
        "params": json.dumps(names[1]),
        **TOLERANCES,
    }
    tensors = {**leaves, **results, "gy": cotangent}
    folder = Path(__file__).parent
    number = len(list(folder.glob(f"{arguments.op}_[0-9]*.safetensors")))
    file = folder / f"{arguments.op}_{number:02}.safetensors"
    save(file, tensors, metadata)
    print(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="recompute the cases of a folder")
    checking.add_argument("folder")
    filling = commands.add_parser("fill", help="add results to the cases of a folder")
    filling.add_argument("folder")
    making = commands.add_parser("new", help="write a case")
    making.add_argument("op", choices=sorted(OPERATORS))
    making.add_argument("--attrs", default="{}", help="JSON, with PyTorch's names")
    making.add_argument("--inputs", nargs="+", default=[], metavar="NAME=SHAPE")
    making.add_argument("--params", nargs="*", default=[], metavar="NAME=SHAPE")
    making.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "check":
        raise SystemExit(check(arguments.folder) != 0)
    if arguments.command == "fill":
        return fill(arguments.folder)
    new(arguments)


if __name__ == "__main__":
    main()

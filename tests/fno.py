"""Four cells of the forecast that `tests/spectral.rs` compares with, by PyTorch in f64.

    pip install torch
    python tests/fno.py
"""

import torch
import torch.nn.functional as F

NUMBERS = iter(range(100))


def wave(*shape):
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (0.4 * torch.sin(0.7 * index + next(NUMBERS))).float().double().reshape(shape)


def spectral(x, weight):
    """fourier_2d.py, with the weights of both corners in one."""
    weight, rows = torch.view_as_complex(weight), weight.shape[2] // 2
    modes, found = torch.fft.rfft2(x), torch.zeros(1, 3, 5, 4, dtype=torch.complex128)
    for kept, of in ((slice(0, rows), slice(0, rows)), (slice(-rows, None), slice(rows, None))):
        found[:, :, kept, :3] = torch.einsum("bixy,ioxy->boxy", modes[:, :, kept, :3], weight[:, :, of])
    return torch.fft.irfft2(found, s=x.shape[-2:])


def linear(y, channels_in, channels_out):
    weight = wave(channels_out, channels_in, 1, 1)
    return F.conv2d(y, weight, wave(channels_out))


x = wave(1, 2, 5, 6)
y = linear(x, 2, 3)
for block in range(2):
    y = spectral(y, wave(3, 3, 4, 3, 2)) + linear(y, 3, 3)
    y = F.gelu(y) if block == 0 else y
y = linear(F.gelu(linear(y, 3, 5)), 5, 2)
print([round(y.flatten()[i].item(), 7) for i in (0, 7, 31, 59)])

"""PyTorch's side of benches/gpu.rs: copies within a device, and a training step of the same UNet in eager mode.

Arguments: rows, columns, channels and width, then sizes of copies in bytes. Prints `what,of,figure`.
"""

import statistics
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(1)  # benches/gpu.rs says what to install

WARM_UP, ROUNDS, TOGETHER = 5, 3, 20
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


class Conv(nn.Conv2d):
    """3 × 3; rows at the ends are repeated, columns are a ring."""

    def __init__(self, channels_in, channels_out):
        super().__init__(channels_in, channels_out, 3)

    def forward(self, x):
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        return super().forward(F.pad(x, (0, 0, 1, 1), mode="replicate"))


class Double(nn.Sequential):
    def __init__(self, channels_in, channels_out):
        layers = Conv(channels_in, channels_out), nn.GELU(), Conv(channels_out, channels_out), nn.GELU()
        super().__init__(*layers)


class UNet(nn.Module):
    def __init__(self, channels, width, levels=2):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(map(Double, [channels, *widths], widths[:-1]))
        self.bottom = Double(*widths[-2:])
        self.up = nn.ModuleList(Double(above + below, above) for above, below in zip(widths, widths[1:]))
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, y):
        skips = []
        for level in self.down:
            skips.append(level(y))
            y = F.avg_pool2d(skips[-1], 2, ceil_mode=True)
        y = self.bottom(y)
        for level, skip in reversed(list(zip(self.up, skips))):
            y = F.interpolate(y, scale_factor=2)[..., : skip.shape[-2], : skip.shape[-1]]
            y = level(torch.cat([y, skip], 1))
        return self.head(y)


def measure(what, of, together, call):
    """Prints the median time of one run, as benches/gpu.rs measures it."""
    sync = torch.cuda.synchronize if GPU else lambda: None
    times = []
    for _ in range(WARM_UP + ROUNDS):
        sync()
        before = time.perf_counter()
        for _ in range(together):
            call()
        sync()
        times.append((time.perf_counter() - before) / together)
    print(f"{what},{of},{statistics.median(times[WARM_UP:]):.9f}")


def main(rows, columns, channels, width, *sizes):
    for size in sizes:
        # As many bytes as the two halos of an exchange.
        here, there = torch.ones(2, 2 * size // 4, device=DEVICE)
        measure("copy", size, TOGETHER, lambda: there.copy_(here))
    model = UNet(channels, width).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1, channels, rows, columns, device=DEVICE)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measure("step", 1, 1, step)
    if GPU:
        print(f"memory,1,{torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""PyTorch's side of benches/attention.rs: a process that runs one attention whenever it is asked to.

Its argument is the number of threads. For every line on stdin, a pass and a case in JSON, it answers the seconds that one
run took; a pass with `:unfold` is by the gathering of keys. Neighborhood attention is `scaled_dot_product_attention` on overlapping tiles of the field, whose keys are
gathered and masked, or the gathering of every query's own keys: the faster of the two. A `FieldTransformer` takes whole
training steps with it.
"""

import functools
import itertools
import json
import sys
import time

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(1)  # benches/conv.rs says what to install

sdpa = torch.nn.functional.scaled_dot_product_attention


def windows(size, kernel, periodic):
    """The first key of every query of a dim, which may lie outside if the dim is periodic."""
    start = torch.arange(size) - kernel // 2
    return start if periodic else start.clamp(0, size - kernel)


def wrapped(place, size, periodic):
    return place % size if periodic else place.clamp(max=size - 1)


def flat(indices, shape):
    """The numbers of all cells of a product of indices."""
    number = torch.zeros(1, dtype=torch.long)
    for index, size in zip(indices, shape):
        number = (number[:, None] * size + index[None, :]).flatten()
    return number


class Windows:
    """Two ways of attention of `[batch, heads, cells, width]` to neighborhoods. Tiles at ends overlap others."""

    def __init__(self, shape, kernel, tile, periodic=(False, False, False)):
        starts = [windows(size, k, p) for size, k, p in zip(shape, kernel, periodic)]
        queries, keys, masks = [], [], []
        ends = [size - t for size, t in zip(shape, tile)]
        for corner in itertools.product(*({min(c, end) for c in range(0, end + t, t)} for t, end in zip(tile, ends))):
            own = [torch.arange(c, c + t) for c, t in zip(corner, tile)]
            first = [start[c].item() for start, c in zip(starts, corner)]
            places = [torch.arange(f, f + t + k - 1) for f, t, k in zip(first, tile, kernel)]
            there = [wrapped(place, size, p) for place, size, p in zip(places, shape, periodic)]
            mask = torch.ones(1, 1, dtype=torch.bool)
            for o, h, place, start, k, p in zip(own, there, places, starts, kernel, periodic):
                inside = (place >= start[o][:, None]) & (place < start[o][:, None] + k) & ((place == h) | p)
                mask = (mask[:, None, :, None] & inside[None, :, None, :]).flatten(2).flatten(0, 1)
            queries.append(flat(own, shape))
            keys.append(flat(there, shape))
            masks.append(mask)
        self.queries, self.keys, self.mask = torch.stack(queries), torch.stack(keys), torch.stack(masks)
        queries = self.queries.flatten()
        self.order = torch.empty(torch.Size(shape).numel(), dtype=torch.long)
        self.order[queries] = torch.arange(queries.numel())  # of a cell in several tiles, any one
        near = [
            wrapped(start[:, None] + torch.arange(k), size, p)
            for start, k, size, p in zip(starts, kernel, shape, periodic)
        ]
        own = torch.zeros(1, 1, dtype=torch.long)
        for index, size in zip(near, shape):
            own = (own[:, None, :, None] * size + index[None, :, None, :]).flatten(2).flatten(0, 1)
        self.own = own

    def ways(self, channels):
        return [self.tiles] + [self.gathered] * (self.own.numel() * channels < 1 << 28)

    def tiles(self, q, k, v):
        batch = len(q)
        q = q[:, :, self.queries].transpose(1, 2).flatten(0, 1)  # [batch * tiles, heads, queries, width]
        k, v = (x[:, :, self.keys].transpose(1, 2).flatten(0, 1) for x in (k, v))
        y = sdpa(q, k, v, attn_mask=self.mask[:, None].repeat(batch, 1, 1, 1))
        return y.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, self.order]

    def gathered(self, q, k, v):
        k, v = (x[:, :, self.own] for x in (k, v))  # [1, heads, cells, keys, width]
        scores = torch.einsum("bhcd,bhckd->bhck", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhck,bhckd->bhcd", scores.softmax(-1), v)


class Attention:
    """Forward passes, and gradients for a cotangent."""

    def __init__(self, shape, ways):
        self.leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        self.cotangent = torch.randn(shape)
        self.ways, self.way = ways, {}

    def run(self, name, way):
        if name == "fwd":
            with torch.no_grad():
                way(*self.leaves)
        else:
            torch.autograd.grad(way(*self.leaves), self.leaves, self.cotangent)


def neighborhood(shape, kernel, heads, width, tile):
    ways = Windows(shape, kernel, tile).ways(heads * width)
    return Attention((1, heads, torch.Size(shape).numel(), width), ways)


def dense(tokens, heads, width, causal):
    return Attention((1, heads, tokens, width), [functools.partial(sdpa, is_causal=causal)])


def rotary(cells, pairs):
    """Cosines and sines of a dim of so many cells, `[cells, 2 * pairs]`."""
    angles = torch.arange(cells)[:, None] * 100.0 ** (-torch.arange(pairs) / pairs)
    angles = torch.cat([angles, angles], 1)
    return angles.cos(), angles.sin()


class Block(nn.Module):
    def __init__(self, channels, heads, rows, columns):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(channels, eps=1e-5) for _ in range(2))
        self.projection, self.output = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.inner, self.outer = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        part = channels // heads // 2
        by_row, by_column = rotary(rows, part // 2), rotary(columns, part // 2)
        tables = [
            torch.cat([r[:, None].expand(-1, columns, -1), c[None].expand(rows, -1, -1)], 2).flatten(0, 1)
            for r, c in zip(by_row, by_column)
        ]
        self.register_buffer("cos", tables[0], persistent=False)
        self.register_buffer("sin", tables[1], persistent=False)

    def rotated(self, x):
        a, b, c, d = x.chunk(4, -1)
        return x * self.cos + torch.cat([-b, a, -d, c], -1) * self.sin

    def forward(self, x, attention):
        y = self.projection(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = attention(self.rotated(y[0]), self.rotated(y[1]), y[2])
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.outer(nn.functional.gelu(self.inner(self.norms[1](x))))


class FieldTransformer(nn.Module):
    """The model of that name with patches of 2 × 2 cells, whose attention is the faster of two ways."""

    def __init__(self, variables, rows, columns, channels, heads, blocks, kernel, tile):
        super().__init__()
        size = (rows + 1) // 2, (columns + 1) // 2
        windows = Windows(size, kernel, tile, (False, True))
        self.cells, self.size = (rows, columns), size
        self.embedding = nn.Conv2d(variables, channels, 2, stride=2)
        self.blocks = nn.ModuleList(Block(channels, heads, *size) for _ in range(blocks))
        self.norm = nn.RMSNorm(channels, eps=1e-5)
        self.recovery = nn.Linear(channels, 4 * variables)
        self.scale = nn.Parameter(torch.full((1, variables, 1, 1), 0.1))
        qkv = torch.randn(3, 1, heads, size[0] * size[1], channels // heads, requires_grad=True)
        ways = windows.ways(channels)
        seconds = [min(seconds_of(lambda: way(*qkv).sum().backward()) for _ in range(2)) for way in ways]
        self.attention = ways[seconds.index(min(seconds))]

    def forward(self, x):
        rows, columns = self.cells
        y = nn.functional.pad(x, (0, columns % 2, 0, rows % 2), mode="replicate")
        y = self.embedding(y).flatten(2).transpose(1, 2).contiguous()
        for block in self.blocks:
            y = block(y, self.attention)
        y = self.recovery(self.norm(y)).transpose(1, 2).unflatten(2, self.size)
        return x + nn.functional.pixel_shuffle(y, 2)[..., :rows, :columns] * self.scale


class Steps:
    """Training steps of a `FieldTransformer`."""

    ways = [None]

    def __init__(self, variables, rows, columns, **options):
        self.model, self.way = FieldTransformer(variables, rows, columns, **options), {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(1, variables, rows, columns)

    def run(self, name, way):
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.x), self.x).backward()
        self.optimizer.step()


def seconds_of(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def timed(case, name, way):
    return seconds_of(lambda: case.run(name, way))


def chosen(case, name):
    name, _, unfold = name.partition(":")
    return name, case.ways[-1] if unfold else fastest(case, name)


def fastest(case, name):
    if name not in case.way:
        case.way[name] = min(case.ways, key=lambda way: min(timed(case, name, way) for _ in range(2)))
    return case.way[name]


def main():
    torch.set_num_threads(int(sys.argv[1]))
    make = {"shape": neighborhood, "tokens": dense, "variables": Steps}

    @functools.lru_cache(maxsize=1)
    def case_of(text):
        case = json.loads(text)
        (kind,) = make.keys() & case.keys()
        return make[kind](**case)

    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for line in sys.stdin:
        name, _, text = line.partition(" ")
        case = case_of(text)
        name, way = chosen(case, name)
        print(timed(case, name, way), flush=True)


if __name__ == "__main__":
    main()

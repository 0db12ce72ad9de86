"""PyTorch's side of benches/attention.rs: a process that runs one attention whenever it is asked to.

Its argument is the number of threads. For every line on stdin, a pass and a case in JSON, it answers the seconds that one
run took. Neighborhood attention is `scaled_dot_product_attention` on overlapping tiles of the field, whose keys are
gathered and masked, or the gathering of every query's own keys: the faster of the two.
"""

import functools
import itertools
import json
import sys
import time

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(1)  # benches/conv.rs says what to install

sdpa = torch.nn.functional.scaled_dot_product_attention


def windows(size, kernel):
    """The first key of every query of a dim."""
    return (torch.arange(size) - kernel // 2).clamp(0, size - kernel)


def flat(indices, shape):
    """The numbers of all cells of a product of indices."""
    number = torch.zeros(1, dtype=torch.long)
    for index, size in zip(indices, shape):
        number = (number[:, None] * size + index[None, :]).flatten()
    return number


class Neighborhood:
    """Tensors `[batch, heads, cells, width]`, and two ways to attend to neighborhoods."""

    def __init__(self, shape, kernel, heads, width, tile):
        cells = torch.Size(shape).numel()
        self.leaves = [torch.randn(1, heads, cells, width, requires_grad=True) for _ in range(3)]
        self.cotangent = torch.randn(1, heads, cells, width)
        starts = [windows(size, k) for size, k in zip(shape, kernel)]
        queries, keys, masks = [], [], []
        for corner in itertools.product(*(range(0, size, t) for size, t in zip(shape, tile))):
            own = [torch.arange(c, c + t) for c, t in zip(corner, tile)]
            first = [start[c].item() for start, c in zip(starts, corner)]
            there = [torch.arange(f, f + t + k - 1).clamp(max=size - 1) for f, t, k, size in zip(first, tile, kernel, shape)]
            mask = torch.ones(1, 1, dtype=torch.bool)
            for o, h, f, start, k in zip(own, there, first, starts, kernel):
                place = torch.arange(f, f + len(h))
                inside = (place >= start[o][:, None]) & (place < start[o][:, None] + k) & (place == h)
                mask = (mask[:, None, :, None] & inside[None, :, None, :]).flatten(2).flatten(0, 1)
            queries.append(flat(own, shape))
            keys.append(flat(there, shape))
            masks.append(mask)
        self.queries, self.keys, self.mask = torch.stack(queries), torch.stack(keys), torch.stack(masks)
        self.order = self.queries.flatten().argsort()
        near = [start[:, None] + torch.arange(k) for start, k in zip(starts, kernel)]
        own = torch.zeros(1, 1, dtype=torch.long)
        for index, size in zip(near, shape):
            own = (own[:, None, :, None] * size + index[None, :, None, :]).flatten(2).flatten(0, 1)
        self.own = own
        self.ways = [self.tiles]
        if own.numel() * heads * width < 1 << 28:
            self.ways.append(self.gathered)
        self.way = {}

    def tiles(self):
        q, k, v = self.leaves
        q = q[0][:, self.queries].transpose(0, 1)  # [tiles, heads, queries, width]
        k, v = (x[0][:, self.keys].transpose(0, 1) for x in (k, v))
        y = sdpa(q, k, v, attn_mask=self.mask[:, None])
        return y.transpose(0, 1).flatten(1, 2)[None][:, :, self.order]

    def gathered(self):
        q, k, v = self.leaves
        k, v = (x[:, :, self.own] for x in (k, v))  # [1, heads, cells, keys, width]
        scores = torch.einsum("bhcd,bhckd->bhck", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhck,bhckd->bhcd", scores.softmax(-1), v)


class Dense:
    def __init__(self, tokens, heads, width, causal):
        self.leaves = [torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3)]
        self.cotangent = torch.randn(1, heads, tokens, width)
        self.ways = [lambda: sdpa(*self.leaves, is_causal=causal)]
        self.way = {}


def run(case, name, way):
    if name == "fwd":
        with torch.no_grad():
            way()
    else:
        torch.autograd.grad(way(), case.leaves, case.cotangent)


def timed(case, name, way):
    start = time.perf_counter()
    run(case, name, way)
    return time.perf_counter() - start


def fastest(case, name):
    if name not in case.way:
        case.way[name] = min(case.ways, key=lambda way: min(timed(case, name, way) for _ in range(2)))
    return case.way[name]


def main():
    torch.set_num_threads(int(sys.argv[1]))
    make = {True: Neighborhood, False: Dense}
    case_of = functools.lru_cache(maxsize=1)(
        lambda text: make["kernel" in text](**json.loads(text))
    )
    print(f"PyTorch {torch.__version__}", flush=True)
    for line in sys.stdin:
        name, _, text = line.partition(" ")
        case = case_of(text)
        way = fastest(case, name)
        print(timed(case, name, way), flush=True)


main()

"""PyTorch's side of benches/conv.rs: a process that runs one convolution whenever it is asked to.

Its argument is the number of threads. It says which PyTorch it is on its first line. Then for every line on stdin, a
pass and a case in JSON, it answers the seconds that one run took, with the freeing of results, until stdin ends.
"""

import functools
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(1)  # benches/conv.rs says what to install


class Case:
    """The tensors of a case, random, and what is run on them."""

    def __init__(self, x, weight, stride, padding, groups):
        self.options = {"stride": stride, "padding": padding, "groups": groups}
        self.conv = getattr(torch.nn.functional, f"conv{len(x) - 2}d")
        shapes = (x, weight, weight[:1])  # the last is the bias's
        self.leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
        self.cotangent = torch.randn_like(self.forward())

    def apply(self):
        return self.conv(*self.leaves, **self.options)

    @torch.no_grad()
    def forward(self):
        return self.apply()

    def gradients(self):
        return torch.autograd.grad(self.apply(), self.leaves, self.cotangent)


def main():
    torch.set_num_threads(int(sys.argv[1]))
    # Cases come one after another: only the tensors of the latest are kept.
    case_of = functools.lru_cache(maxsize=1)(lambda text: Case(**json.loads(text)))
    print(f"PyTorch {torch.__version__}", flush=True)
    for line in sys.stdin:
        name, _, text = line.partition(" ")
        case = case_of(text)
        run = {"fwd": case.forward, "fwd+bwd": case.gradients}[name]
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


main()

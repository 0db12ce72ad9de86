"""PyTorch's side of benches/conv.rs: convolutions, by serve_cases.py."""

from serve_cases import serve, torch


class Case:
    """The tensors of a case, random, and what is run on them."""

    def __init__(self, x, weight, stride, padding, groups, bf16):
        self.options = {"stride": stride, "padding": padding, "groups": groups}
        self.conv = getattr(torch.nn.functional, f"conv{len(x) - 2}d")
        shapes = (x, weight, weight[:1])  # the last is the bias's
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        self.cotangent = torch.randn_like(self.forward())

    def apply(self):
        return self.conv(*self.leaves, **self.options)

    @torch.no_grad()
    def forward(self):
        return self.apply()

    def gradients(self):
        return torch.autograd.grad(self.apply(), self.leaves, self.cotangent)


serve(Case)

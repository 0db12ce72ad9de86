"""PyTorch's side of benches/models.rs: training steps and inference of the same models, by serve_cases.py."""

from serve_cases import serve, torch

from torch import nn  # after the check that PyTorch is there
from torch.nn import functional as F

from attention_pytorch import FieldTransformer
from gpu_pytorch import Conv, UNet


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = Conv(width, width), Conv(width, width)
        self.scale = nn.Parameter(torch.full((1, width, 1, 1), 0.5))

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x))) * self.scale


class SurrogateCnn(nn.Module):
    def __init__(self, variables, width=32, blocks=4):
        super().__init__()
        self.stem, self.head = Conv(variables, width), Conv(width, variables)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.scale = nn.Parameter(torch.full((1, variables, 1, 1), 0.1))

    def forward(self, x):
        y = self.blocks(F.gelu(self.stem(x)))
        return x + self.head(F.gelu(y)) * self.scale


class Case:
    """A model with its optimizer, and a state."""

    def __init__(self, model, variables, batch, rows, columns, channels_last):
        self.x = torch.randn(batch, variables, rows, columns)
        if model == "UNet":
            self.model = UNet(variables, 32)
        elif model == "SurrogateCnn":
            self.model = SurrogateCnn(variables)
        else:
            self.model = FieldTransformer(variables, rows, columns, 64, 4, 4, (7, 7), (8, 8))
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.x = self.x.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @torch.no_grad()
    def forward(self):
        return self.model(self.x)

    def gradients(self):
        self.optimizer.zero_grad()
        F.mse_loss(self.model(self.x), self.x).backward()
        self.optimizer.step()


# Memory of libraries that PyTorch loads on first use belongs to no case.
Case("UNet", 2, 1, 16, 16, False).gradients()
# Both layouts take turns.
serve(Case, kept=2)

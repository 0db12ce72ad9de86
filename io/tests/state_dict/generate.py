"""Writes weights.pt, a checkpoint as training loops in PyTorch save it, whose values are their indices, and complex.pt.

    pip install torch
    python io/tests/state_dict/generate.py
"""

from pathlib import Path

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.conv = nn.Conv1d(4, 2, 3)
        self.norm = nn.BatchNorm1d(4)


def main():
    model = Model()
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            if tensor.is_floating_point():
                tensor.copy_(100 * number + torch.arange(tensor.numel()).reshape(tensor.shape))
    model.conv.to(torch.bfloat16)
    state = {"epoch": 3, "model": model.state_dict()}
    torch.save(state, Path(__file__).with_name("weights.pt"))
    torch.save({"weight": torch.zeros(2, dtype=torch.complex64)}, Path(__file__).with_name("complex.pt"))


if __name__ == "__main__":
    main()

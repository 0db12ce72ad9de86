"""Checks what Python reads of the checkpoint that `04_checkpoint` saved."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from read_checkpoint import read

index, tensors = read(sys.argv[1])
assert index["step"] == 120 and index["values"] == {"epoch": 3}, index
dtype, shape, cells = tensors["field"]
assert (dtype, shape) == ("F32", [2, 45, 90]) and list(cells) == list(range(2 * 45 * 90))
assert tensors["model.weight"][1] == [8, 2, 3, 3] and tensors["model.bias"][1] == [8]
assert sum(map(abs, tensors["model.weight"][2])) > 0.1
print(f"Python read {len(tensors)} tensors of {index['ranks']} ranks")

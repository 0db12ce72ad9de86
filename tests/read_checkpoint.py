"""Checks what Python reads of the checkpoint that `04_checkpoint` saved."""

import sys
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from read_checkpoint import read, widen

index, tensors = read(sys.argv[1])
assert index["step"] == 120 and index["values"] == {"epoch": 3}, index
dtype, shape, cells = tensors["field"]
assert (dtype, shape) == ("F32", [2, 45, 90]) and list(cells) == list(range(2 * 45 * 90))
assert tensors["model.weight"][1] == [8, 2, 3, 3] and tensors["model.bias"][1] == [8]
assert sum(map(abs, tensors["model.weight"][2])) > 0.1
assert list(widen("F16", array("H", [0x3E00, 0xC000]))) == [1.5, -2]
assert list(widen("BF16", array("H", [0x3FC0, 0xC000]))) == [1.5, -2]
print(f"Python read {len(tensors)} tensors of {index['ranks']} ranks")

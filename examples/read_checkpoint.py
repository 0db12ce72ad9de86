"""Reads a checkpoint in Python, with the package `safetensors` and nothing else: `read_checkpoint.py FOLDER`.

`read(folder)` gives the tensors as a dtype, a shape, and the elements in row-major order, those in half precision as
f32.
"""

import json
import math
import struct
import sys
import zlib
from array import array
from pathlib import Path

from safetensors import deserialize

TYPES = {"F64": "d", "F32": "f", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U64": "Q", "U32": "I", "U16": "H",
         "U8": "B", "BOOL": "B", "F16": "H", "BF16": "H"}


def read(folder):
    """The index, and a dict of (dtype, shape, elements) by name."""
    folder = Path(folder)
    index = json.loads((folder / "index.json").read_text())
    files = {name: dict(deserialize((folder / name).read_bytes())) for name in index["files"]}
    tensors = {}
    for name, entry in index["tensors"].items():
        shape = entry["shape"]
        whole = array(TYPES[entry["dtype"]], bytes(math.prod(shape) * array(TYPES[entry["dtype"]]).itemsize))
        for piece in entry["pieces"]:
            data = bytes(files[piece["file"]][piece["key"]]["data"])
            if zlib.crc32(data) != piece["crc32"]:
                raise ValueError(f"{name}: {piece['file']} is damaged")
            place(whole, shape, array(whole.typecode, data), piece["start"], piece["shape"])
        tensors[name] = (entry["dtype"], shape, widen(entry["dtype"], whole))
    return index, tensors


def widen(dtype, elements):
    """Elements as f32 if they are the bits of numbers in half precision."""
    if dtype == "F16":
        return array("f", struct.unpack(f"={len(elements)}e", elements.tobytes()))
    if dtype == "BF16":
        return array("f", array("I", [bits << 16 for bits in elements]).tobytes())
    return elements


def place(whole, shape, piece, start, extents):
    """Copies a dense box of cells to where it belongs, row by row."""
    if not extents:
        whole[:] = piece
        return
    row = extents[-1]
    for number in range(math.prod(extents[:-1])):
        at, rest = 0, number
        index = []
        for extent in reversed(extents[:-1]):
            rest, i = divmod(rest, extent)
            index.insert(0, i)
        for i, first, size in zip(index + [0], start, shape):
            at = at * size + first + i
        whole[at:at + row] = piece[number * row:(number + 1) * row]


if __name__ == "__main__":
    index, tensors = read(sys.argv[1])
    print(f"step {index['step']}, saved by {index['ranks']} ranks, values {index['values']}")
    for name, (dtype, shape, elements) in tensors.items():
        print(f"  {name}: {dtype} {shape}, sum {sum(elements):.6g}")

#!/bin/sh
# Reads a checkpoint of three ranks with Python: test_checkpoint.sh TARGET, Cargo's folder with the
# built examples and, in `python`, a Python with safetensors.
set -eu

target=$1
here=$(dirname "$0")
echo "== a checkpoint of 3 ranks, read by Python"
rm -rf "$target/checkpoint"
"$target/debug/examples/04_checkpoint" 3 "$target/checkpoint" > /dev/null
"$target/python/bin/python" "$here/../tests/read_checkpoint.py" "$target/checkpoint/step_000000120"

#!/bin/sh
# Compares random cases of operators with PyTorch, if HALOCLINE_PYTHON has it; those on the sphere
# if it has torch-harmonics: fuzz_pytorch.sh TARGET
set -eu

target=$1
if ! "$HALOCLINE_PYTHON" -c 'import torch, safetensors' 2> /dev/null; then
    echo "$HALOCLINE_PYTHON has no PyTorch or safetensors: no cases beside it"
    exit 0
fi
folder=$target/random
rm -rf "$folder"
HALOCLINE_WRITE_CASES=$folder HALOCLINE_CASES=500 \
    cargo nextest run --profile fuzz --release --workspace --features mpi,learner --test random
"$HALOCLINE_PYTHON" tests/golden/generate.py fill "$folder"
cargo build --release --workspace --features mpi,learner --example golden
"$target/release/examples/golden" "$folder" --ranks 1,3

#!/bin/sh
# Runs the self-checking examples on local ranks, under MPI and, where two network namespaces can be
# made, on two hosts: test_examples.sh FOLDER, which holds the built examples.
set -eu

built=$1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
two_hosts=$(dirname "$0")/two_hosts.sh
for example in 01_scatter_and_conv 02_partial 03_halo 04_checkpoint 05_neighborhood_attention 06_tensor_parallel 08_burn_learner; do
    for ranks in 1 2 4; do
        echo "== $example on $ranks local ranks"
        "$built/$example" "$ranks" > /dev/null
    done
    echo "== $example under mpirun -n 4"
    mpirun --oversubscribe -n 4 "$built/$example" > /dev/null
    if "$two_hosts" --possible; then
        echo "== $example on two hosts"
        "$two_hosts" 4 "$built/$example" > /dev/null
    fi
done

#!/bin/sh
# Compares the golden cases on all engines with the bits of local ranks: test_golden.sh PROGRAM
# FOLDER, the example `golden` and its cases.
set -eu

golden="$1 $2"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
two_hosts=$(dirname "$0")/two_hosts.sh

# Runs golden with the given launcher, and compares its output with that of local ranks.
same_bits() {
    expected=$1
    name=$2
    shift 2
    echo "== golden $name: the bits of local ranks"
    found=$("$@" $golden)
    echo "$found" | tail -n 1
    if [ "$found" != "$expected" ]; then
        echo "local ranks gave: $expected" >&2
        exit 1
    fi
}

four=$($golden --ranks 4)
two=$($golden --ranks 2)
same_bits "$four" "under MPI" mpirun --oversubscribe -n 4 -x RAYON_NUM_THREADS=1
if "$two_hosts" --possible; then
    same_bits "$four" "on two hosts, by MPI" "$two_hosts" 4 -x RAYON_NUM_THREADS=1
    same_bits "$two" "on two hosts, by TCP" env RAYON_NUM_THREADS=1 "$two_hosts" --without-mpi 2
else
    echo "two hosts not run: network namespaces need Linux, root and iproute2"
fi
echo "== golden with messages of ranks to themselves"
HALOCLINE_LOOPBACK=1 $golden --ranks 1,2 > /dev/null
for method in direct winograd $(grep -qsw amx_bf16 /proc/cpuinfo && echo matrices); do
    echo "== golden of convolutions by $method"
    for op in conv2d conv3d; do
        HALOCLINE_CONV=$method $golden --op $op --ranks 1,2,3 > /dev/null
    done
done
for isa in portable $(grep -qsw avx2 /proc/cpuinfo && echo avx2) $(grep -qsw amx_bf16 /proc/cpuinfo && echo avx512); do
    echo "== golden on $isa"
    HALOCLINE_ISA=$isa $golden --ranks 1,2 > /dev/null
done

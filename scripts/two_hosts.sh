#!/bin/sh
# Runs a program as if on two hosts: two network namespaces joined by a virtual cable, half of the
# ranks in each, with TCP between all of them. Needs Linux, root and iproute2, and, unless called
# with --without-mpi, Open MPI.
#
#   scripts/two_hosts.sh RANKS [OPTIONS OF MPIRUN] PROGRAM [ARGUMENTS]
#   scripts/two_hosts.sh --without-mpi RANKS PROGRAM [ARGUMENTS]
#   scripts/two_hosts.sh --possible    whether it can
set -eu

a=halocline-a b=halocline-b
if [ "${1:-}" = --possible ]; then
    [ "$(id -u)" = 0 ] && ip netns add "$a" 2> /dev/null && ip netns del "$a"
    exit
fi
if [ "${1:-}" = --start ]; then
    # Called by `mpirun` to start its daemon on a host: `--start HOST COMMAND`.
    shift 2
    exec ip netns exec "$b" unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$b" "$@"
fi

mpi=true
if [ "${1:-}" = --without-mpi ]; then
    mpi=false
    shift
fi
ranks=$1
shift
clean() {
    ip netns del "$a" 2> /dev/null || true
    ip netns del "$b" 2> /dev/null || true
}
clean
trap clean EXIT
ip netns add "$a"
ip netns add "$b"
ip link add name eth0 netns "$a" type veth peer name eth0 netns "$b"
for host in "$a 10.77.0.1" "$b 10.77.0.2"; do
    ip -n "${host% *}" address add "${host#* }/24" dev eth0
    ip -n "${host% *}" link set eth0 up
    ip -n "${host% *}" link set lo up
done
half=$((ranks / 2))
if ! $mpi; then
    export WORLD_SIZE=$ranks MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
    HALOCLINE_SECRET=$(od -An -N16 -tx8 /dev/urandom)
    export HALOCLINE_SECRET
    rank=$ranks
    while [ "$rank" -gt 0 ]; do
        rank=$((rank - 1))
        [ "$rank" -lt $((ranks - half)) ] && host=$a || host=$b
        RANK=$rank ip netns exec "$host" "$@" &
        pids="${pids:-} $!"
    done
    for pid in $pids; do wait "$pid"; done
    exit
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ip netns exec "$a" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$a" \
    mpirun --oversubscribe -n "$ranks" -H "10.77.0.1:$((ranks - half)),10.77.0.2:$half" \
    --mca plm_rsh_agent "$(realpath "$0") --start" --mca pml ob1 --mca btl self,tcp \
    --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 "$@"

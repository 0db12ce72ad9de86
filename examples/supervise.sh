#!/usr/bin/env bash
# Runs an MPI program to its end even if hosts fail: a program that resumes by itself
# (`Trainer::resume_or_start`) is restarted from its last checkpoint, with fewer ranks if a host no
# longer answers.
#
#   examples/supervise.sh HOSTS FOLDER PROGRAM [ARGUMENTS]
#
# HOSTS   file with one host and its number of ranks per line
# FOLDER  folder of the program's checkpoints; the script gives up after three failures in a row
#         without a new one
#
# Settings: MPIRUN, the command and its options (`mpirun`); PROBE, a command that succeeds for a
# host that answers.
set -u

hosts=$1 folder=$2
shift 2
mpirun=${MPIRUN:-mpirun}
probe=${PROBE:-ssh -o BatchMode=yes -o ConnectTimeout=5}

newest() {
    ls "$folder" 2> /dev/null | grep '^step_' | sort | tail -n 1
}

answers() {
    if [ "${PROBE:-}" ]; then $probe "$1"; else $probe "$1" true; fi
}

# Ctrl-C and the queue stop the job, which saves, and then this script. The job has its own process
# group, as mpirun would take a second signal from the terminal as a request to end at once.
set -m
job=""
end() {
    trap '' INT TERM
    [ "$job" ] && kill -TERM "$job" && wait "$job"
    exit 130
}
trap end INT TERM
failures=0
while [ $failures -lt 3 ]; do
    ranks=0 list=""
    while read -r host slots || [ "$host" ]; do
        if answers "$host" < /dev/null > /dev/null 2>&1; then
            ranks=$((ranks + slots))
            list=${list:+$list,}$host:$slots
        else
            echo "supervise: $host does not answer"
        fi
    done < "$hosts"
    if [ $ranks = 0 ]; then
        echo "supervise: no host answers" >&2
        exit 1
    fi
    before=$(newest)
    echo "supervise: $ranks ranks on $list, from ${before:-the start}"
    $mpirun -n $ranks -H "$list" "$@" &
    job=$!
    wait "$job" && exit 0
    status=$?
    if [ "$(newest)" = "$before" ]; then
        failures=$((failures + 1))
    else
        failures=0
    fi
    echo "supervise: the job failed with status $status"
done
echo "supervise: three failures without a new checkpoint in $folder" >&2
exit 1

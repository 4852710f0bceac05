#!/bin/sh
# hosts.sh - trains on several machines that are reached by ssh, without a scheduler.
#
#     launch/hosts.sh HOSTS [-n RANKS] build/trireme train CONFIG [options of trireme]
#
# HOSTS is a file with a line for each machine, and how many ranks it shall hold: one a GPU, or one
# a CPU socket (its threads then use the cores):
#
#     node1 slots=2
#     node2 slots=2
#
# Start it on any machine that reaches all of these. What they need:
#   - ssh without a password (ssh-keygen, ssh-copy-id node1, ssh-copy-id node2);
#   - this folder at the same path, with the same build in it and the same Open MPI;
#   - checkpoint.directory on a disk that all of them share (NFS, Lustre, ...): the ranks write one
#     file together. Data may lie on local disks, at the same path.
# Ranks follow each other as the lines do, node1's first, so that neighbours in the grid (tensor,
# then context, then data) share a machine where they can.
#
# `kill -USR1` to the mpirun that this starts saves and stops (exit code 75); the same command goes
# on. A machine that is switched off or cut off ends the job in seconds (launch/env.sh says how), a
# rank that stalls ends it after training.watchdog_seconds; again the same command goes on.
#
# TRIREME_NETWORK=10.1.0.0/16 (or an interface's name) says which network to use, where machines
# have several: without it Open MPI tries all, and hangs if one (docker0, say) leads nowhere.
set -euf
here=$(dirname "$0")

usage() {
    echo "usage: launch/hosts.sh HOSTS [-n RANKS] PROGRAM [WORDS ...]; its head says more" >&2
    exit 64
}
if [ $# -lt 2 ]; then usage; fi
hosts=$1
shift
ranks=""
if [ "$1" = -n ]; then
    if [ $# -lt 3 ]; then usage; fi
    case $2 in
    *[!0-9]* | "" | 0*)
        echo "error: -n $2: RANKS must be a whole number, at least 1" >&2
        exit 64
        ;;
    esac
    ranks="-n $2"
    shift 2
fi
program=$1
if [ ! -f "$hosts" ]; then
    echo "error: $hosts: no such file; it lists the machines, a line 'NAME slots=RANKS' each" >&2
    exit 66
fi
# Names, and a line that is not NAME or NAME slots=RANKS (mpirun's max_slots and user may follow):
# at a typing error mpirun fails without a reason.
lines=$(sed -e 's/#.*//' -e 's/[[:space:]]\{1,\}/ /g' -e 's/^ //' -e 's/ $//' -e '/^$/d' "$hosts")
names=$(echo "$lines" | cut -d ' ' -f 1 | sort -u)
number='(slots|max[-_]slots) ?= ?[1-9][0-9]*' user='user[-_]?(name)? ?= ?[^ =]+'
odd=$(echo "$lines" | grep -vE "^[][A-Za-z0-9_.@:%-]+( $number| $user)*\$" | head -n 1)
if [ -z "$names" ] || [ -n "$odd" ]; then
    echo "error: $hosts: ${odd:-no machine in it}; it lists the machines, a line" \
        "'NAME slots=RANKS' each" >&2
    exit 64
fi
if [ ! -x "$program" ] || [ -d "$program" ]; then
    echo "error: $program: no such program here; build it" \
        "(cmake --preset release && cmake --build --preset release)" >&2
    exit 66
fi
. "$here/env.sh"

# Each machine must be there, without asking for a password, and hold the same program: otherwise
# mpirun says so at length, or ranks of two versions talk past each other.
agent=${OMPI_MCA_plm_rsh_agent:-ssh -o BatchMode=yes -o ConnectTimeout=10}
mine=$(cksum <"$program")
quoted() { printf '%s' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"; }
look="cd $(quoted "$PWD") && cksum <$(quoted "$program")"
answers=$(mktemp -d)
trap 'rm -rf "$answers"' EXIT
for name in $names; do
    case $name in
    localhost | "$(hostname)") echo "$mine" >"$answers/$name" ;; # needs no ssh
    *) $agent "$name" "$look" >"$answers/$name" 2>"$answers/$name.error" </dev/null & ;;
    esac
done
wait
wrong=0
for name in $names; do
    if [ ! -s "$answers/$name" ]; then
        echo "error: $name: $(head -n 1 "$answers/$name.error" | tr -d '\r'); it must answer" \
            "'$agent $name', and hold $program in $PWD" >&2
        wrong=1
    elif [ "$(cat "$answers/$name")" != "$mine" ]; then
        echo "error: $name: $program is another build there; copy this one" >&2
        wrong=1
    fi
done
if [ "$wrong" -ne 0 ]; then exit 69; fi
rm -rf "$answers"

# mpirun hands on its own settings; of the others each must be named. Word splitting is meant:
# $ranks is an option and its value, or nothing.
for name in OMP_WAIT_POLICY OMP_PROC_BIND OMP_NUM_THREADS HDF5_USE_FILE_LOCKING CUDA_DEVICE_ORDER \
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_P2P_DISABLE NCCL_IB_DISABLE; do
    if printenv "$name" >/dev/null; then set -- -x "$name" "$@"; fi
done
exec mpirun --hostfile "$hosts" $ranks "$@"

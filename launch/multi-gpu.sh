#!/bin/sh
# multi-gpu.sh - trains on the GPUs of this machine, one rank each.
#
#     launch/multi-gpu.sh [-n RANKS] build-cuda/trireme train CONFIG [options of trireme]
#     CUDA_VISIBLE_DEVICES=2,3 launch/multi-gpu.sh build-cuda/trireme train CONFIG
#
# It asks nvidia-smi how many there are; CUDA_VISIBLE_DEVICES chooses among them (numbers as
# nvidia-smi prints them, or names such as GPU-8f3c...), -n takes fewer, the first of these. Rank i
# of the machine takes the i-th. run.device is cuda unless an option says otherwise. The grid is the
# config's: with eight GPUs and parallel.pipeline 2, say, four ranks share the data of each stage.
#
# The program must have its module for GPUs beside it (cmake --preset cuda; cmake --build --preset
# cuda). Several machines: launch/hosts.sh with `slots=` the GPUs of each, or launch/slurm.sbatch.
# What the GPUs say to each other goes through NCCL, whose settings launch/env.sh explains.
#
# Cores. A rank copies between its GPU and the host, reads data and starts kernels: it should run on
# cores of the socket that its GPU hangs on. Open MPI cannot see that (`--map-by numa` deals ranks
# out to the sockets in turn, 0 1 0 1, while GPUs are numbered socket by socket, 0 0 1 1), so mpirun
# binds nothing here (--bind-to none) and each rank binds itself with taskset to the cores that
# Linux says are near its GPU (local_cpulist; `nvidia-smi topo -m` shows them). Ranks of one socket
# share its cores; each takes its part of them as OpenMP threads, unless OMP_NUM_THREADS is set.
# TRIREME_BIND=none leaves all cores to all ranks.
set -eu
here=$(dirname "$0")

usage() {
    echo "usage: launch/multi-gpu.sh [-n RANKS] PROGRAM [WORDS ...]; its head says more" >&2
    exit 64
}

# --- what each rank runs: multi-gpu.sh --near "CORES CORES ..." PROGRAM [WORDS ...] ---------------
# A word of CORES for each rank, as taskset takes them; `-` where they are not known.
if [ "${1:-}" = --near ] && [ $# -ge 3 ] && [ -n "${OMPI_COMM_WORLD_LOCAL_RANK:-}" ]; then
    lists=$2
    shift 2
    place=0 cores=- sharing=0
    for list in $lists; do
        if [ "$place" = "$OMPI_COMM_WORLD_LOCAL_RANK" ]; then cores=$list; fi
        place=$((place + 1))
    done
    for list in $lists; do
        if [ "$list" = "$cores" ]; then sharing=$((sharing + 1)); fi
    done
    # A container may not have these cores at all: then the rank runs where it may.
    if [ "$cores" = - ] || ! taskset -c "$cores" true 2>/dev/null; then exec "$@"; fi
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        threads=$(($(taskset -c "$cores" nproc) / sharing))
        if [ "$threads" -lt 1 ]; then threads=1; fi
        export OMP_NUM_THREADS="$threads"
    fi
    exec taskset -c "$cores" "$@"
fi

# --- the call -------------------------------------------------------------------------------------
ranks=""
if [ "${1:-}" = -n ]; then
    if [ $# -lt 3 ]; then usage; fi
    case $2 in
    *[!0-9]* | "" | 0*)
        echo "error: -n $2: RANKS must be a whole number, at least 1" >&2
        exit 64
        ;;
    esac
    ranks=$2
    shift 2
fi
if [ $# -lt 1 ]; then usage; fi
case $1 in -*) usage ;; esac
program=$1
if [ ! -x "$program" ] || [ -d "$program" ]; then
    echo "error: $program: no such program here; build it (cmake --preset cuda; cmake --build" \
        "--preset cuda)" >&2
    exit 66
fi

# --- the GPUs -------------------------------------------------------------------------------------
none() {
    echo "error: no GPU: $*. \`nvidia-smi\` must list at least one (driver installed? container" \
        "started with --gpus all?). Without one, \`mpirun -n RANKS $program ...\` trains on" \
        "CPUs (. launch/env.sh first)" >&2
    exit 69
}
if ! command -v nvidia-smi >/dev/null; then none "there is no nvidia-smi here"; fi
# A line each: number, name for CUDA_VISIBLE_DEVICES, place on the PCI bus.
if ! all=$(nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2>&1); then
    none "nvidia-smi says: $(echo "$all" | head -n 1)"
fi
all=$(echo "$all" | tr -d ',' | grep '^[0-9]') || none "nvidia-smi lists none"

# Fills `places` with the buses of those that CUDA_VISIBLE_DEVICES names, in its order.
places=""
choose() {
    for word in $(echo "$CUDA_VISIBLE_DEVICES" | tr ',' ' '); do
        case $word in
        MIG-*) bus=- ;; # a part of a GPU; nvidia-smi does not say here where it is
        *[!0-9]*) bus=$(echo "$all" | awk -v w="$word" 'index($2, w) == 1 { print $3 }') ;;
        *) bus=$(echo "$all" | awk -v w="$word" '$1 == w { print $3 }') ;;
        esac
        if [ "$(echo "$bus" | wc -w)" -ne 1 ]; then
            known=$(echo "$all" | awk '{ printf " %s (%s)", $1, $2 }')
            echo "error: CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES, but nvidia-smi knows no" \
                "single GPU $word; it lists$known" >&2
            exit 64
        fi
        places="$places $bus"
    done
}
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    choose
    if [ -z "$places" ]; then none "CUDA_VISIBLE_DEVICES is empty, which hides them; unset it"; fi
else
    places=$(echo "$all" | awk '{ print $3 }')
fi
gpus=$(echo "$places" | wc -w)
ranks=${ranks:-$gpus}
if [ "$ranks" -gt "$gpus" ]; then
    echo "error: -n $ranks: there are $gpus GPUs to use, and a rank needs one of its own; leave" \
        "-n out (ranks that share a GPU, for tests: mpirun -n $ranks with run.collectives mpi)" >&2
    exit 64
fi

# --- cores near each, a word a rank ---------------------------------------------------------------
# nvidia-smi writes 00000000:3B:00.0, Linux 0000:3b:00.0.
buses=${SYSFS_PCI_DEVICES:-/sys/bus/pci/devices}
near=""
for bus in $places; do
    file=$buses/$(echo "$bus" | tr 'A-F' 'a-f' | sed 's/^0000\(....:\)/\1/')/local_cpulist
    list=""
    if [ "${TRIREME_BIND:-near}" != none ] && [ -r "$file" ]; then list=$(cat "$file"); fi
    near="$near ${list:--}"
    if [ "$(echo "$near" | wc -w)" -eq "$ranks" ]; then break; fi
done
near=${near# }

. "$here/env.sh"

# Options say run.device, or it is cuda. generate takes the device of its checkpoint.
case ${2:-} in
train | verify | eval | bench)
    device=""
    for word in "$@"; do
        case $word in *run.device=*) device=$word ;; esac
    done
    if [ -z "$device" ]; then set -- "$@" --set run.device=cuda; fi
    ;;
esac
echo "multi-gpu.sh: $ranks rank(s), one a GPU; cores near them: $near"
exec mpirun -n "$ranks" --bind-to none "$here/multi-gpu.sh" --near "$near" "$@"

# env.sh - what mpirun and MPI programs need to know before they start. Source it in the shell that
# calls mpirun:
#
#     . launch/env.sh
#     mpirun -n 4 build/trireme train configs/quickstart.yaml
#
# It only sets environment variables, and none that is already set: put your own value first to
# change one. It works in sh, dash and bash. OMPI_MCA_x is Open MPI's way of spelling the setting x
# (`ompi_info --all` explains each).

# Containers log in as root, which mpirun refuses unless it is told twice that this is meant.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# Allow more ranks than cores, so that `-n 4` works on a laptop with two.
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"

# Do not nail each rank to a core: with two ranks or fewer mpirun would put all threads of a rank on
# one core. The operating system spreads them better.
export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"

# A rank that waits for a message gives its core to one that has work. Without this, and with more
# ranks than cores, a small sum over 8 ranks took 64 ms instead of 0.05 ms.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"

# The same for the threads of one rank: those with nothing to do sleep instead of spinning on a core
# that another rank could use.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
# Threads may move between cores. If they may not, ranks that are not bound all start on core 0.
export OMP_PROC_BIND="${OMP_PROC_BIND:-false}"

# Open MPI 4.1 reads parts of HDF5 files wrongly, without an error, when it may read more than was
# asked for and pick the pieces out ("data sieving"). Checkpoints are read with it off. The program
# sets this for itself as well; other readers of our files under mpirun need it too.
export OMPI_MCA_fbtl_posix_read_datasieving="${OMPI_MCA_fbtl_posix_read_datasieving:-0}"
# If a checkpoint on a network disk cannot be opened because of a lock ("unable to lock file"), set
# HDF5_USE_FILE_LOCKING=FALSE. It is safe: only one job writes a checkpoint, and under another name
# until it is whole. It is not set here since locks do no harm where they work.

# A host that loses power or its network cable says nothing. Ask idle hosts for a sign of life:
# after 5 s of silence, every second, and end the job after 3 questions without an answer (8 s;
# 8 min as Open MPI comes).
export OMPI_MCA_oob_tcp_keepalive_time="${OMPI_MCA_oob_tcp_keepalive_time:-5}"
export OMPI_MCA_oob_tcp_keepalive_intvl="${OMPI_MCA_oob_tcp_keepalive_intvl:-1}"
export OMPI_MCA_oob_tcp_keepalive_probes="${OMPI_MCA_oob_tcp_keepalive_probes:-3}"

# Over TCP, messages of up to 4 MB go out at once (64 kB as Open MPI comes). A longer one first asks
# and is answered, and a rank that computes answers late: of the rows that travel to experts under a
# shared expert 98 % hide, and without this 38 (BENCHMARKS.md, between two hosts).
export OMPI_MCA_btl_tcp_eager_limit="${OMPI_MCA_btl_tcp_eager_limit:-4194304}"

# Which network the hosts talk over, where they have several: TRIREME_NETWORK=10.1.0.0/16, or an
# interface (eth0). Without it Open MPI tries them all, and hangs if one that looks right
# (docker0, a virtual machine's bridge) leads nowhere.
if [ -n "${TRIREME_NETWORK:-}" ]; then
    export OMPI_MCA_btl_tcp_if_include="${OMPI_MCA_btl_tcp_if_include:-$TRIREME_NETWORK}"
    export OMPI_MCA_oob_tcp_if_include="${OMPI_MCA_oob_tcp_if_include:-$TRIREME_NETWORK}"
fi

# GPUs talk to each other through NCCL, NVIDIA's library of collectives, which has settings of its
# own. These two are set here; the others below are right as they come.
# Say why something failed: without it an error is only "unhandled system error". INFO instead also
# prints at the start which way (NVLink, PCI, shared memory, network) each pair of GPUs takes.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Number GPUs by their place on the PCI bus, as nvidia-smi does; CUDA by itself puts the fastest
# first, and then CUDA_VISIBLE_DEVICES=1 may be another card than nvidia-smi's 1.
export CUDA_DEVICE_ORDER="${CUDA_DEVICE_ORDER:-PCI_BUS_ID}"
# The network between machines, as above. NCCL takes names alone, not subnets; without one it takes
# InfiniBand where there is some, else the first interface that is not docker's or lo.
case ${TRIREME_NETWORK:-} in
"" | *[./]*) ;;
*) export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$TRIREME_NETWORK}" ;;
esac
# If TRIREME_NETWORK is a subnet, name the interface of each machine that has it:
# export NCCL_SOCKET_IFNAME=eth0
#
# If a job on one machine hangs in its first collective, or sums come out wrong: GPUs copy into each
# other's memory (peer access), which virtual machines and some mainboards (PCI access control, ACS)
# break. Without it they go through host memory: slow, but then you know.
# export NCCL_P2P_DISABLE=1
# If NCCL cannot get shared memory: containers have 64 MB of /dev/shm; start them with
# --shm-size=1g (docker) rather than setting NCCL_SHM_DISABLE.
# If InfiniBand cards are there but lead nowhere, or should be left to others:
# export NCCL_IB_DISABLE=1

# Time to save when mpirun itself gets SIGTERM, in seconds. mpirun waits this long, passes SIGTERM
# to the ranks, waits this long again, then kills what is left: the second wait is for the running
# step and the save. A job that ends with an error is ended the same way, so mpirun returns about
# twice this time after the error's message; as Open MPI comes it is 1 s. Where a scheduler sends
# SIGTERM and gives 30 s, put 15 here. `kill -USR1` to mpirun is better than SIGTERM: it reaches
# the ranks at once and leaves them all the time they need.
export OMPI_MCA_odls_base_sigkill_timeout="${OMPI_MCA_odls_base_sigkill_timeout:-5}"

#!/bin/sh
# setup.sh - installs the Debian packages that building, testing and the quickstart need; does
# nothing when all are there. Usage: launch/setup.sh [--cluster]. Needs root, or sudo.
# --cluster adds what the tests of several hosts and of Slurm need; they are skipped without it. It
# brings services (munge, slurmd) that Debian starts with the machine: not for everybody's laptop.
# TRIREME_SETUP=skip leaves it out: for systems where the packages have other names.
set -eu

compiler="build-essential cmake pkg-config"
libraries="libopenmpi-dev libhdf5-openmpi-dev libdnnl-dev libfyaml-dev libjansson-dev libxxhash-dev"
programs="openmpi-bin hdf5-tools bible-kjv"
tests="libcmocka-dev python3-pytest python3-h5py python3-numpy python3-yaml"
cluster="iproute2 util-linux slurm-client slurmctld slurmd slurm-wlm-basic-plugins munge"

case ${1:-} in
--cluster) tests="$tests $cluster" ;;
"") ;;
*)
    echo "usage: launch/setup.sh [--cluster]" >&2
    exit 64
    ;;
esac

if [ "${TRIREME_SETUP:-}" = skip ]; then exit 0; fi

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    cat >&2 <<END
error: launch/setup.sh knows only Debian, Ubuntu and their kin (no apt-get here). Install what your
system calls these packages, then set TRIREME_SETUP=skip and run the command again:
    $compiler
    $libraries
    $programs
    $tests
END
    exit 69
fi

missing=""
for package in $compiler $libraries $programs $tests; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    if [ "$state" != installed ]; then missing="$missing $package"; fi
done
if [ -z "$missing" ]; then exit 0; fi

echo "Installing:$missing"
as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "error: neither root nor sudo: ask an administrator for apt-get install$missing" >&2
        exit 77
    fi
    as_root="sudo"
    if [ ! -t 0 ]; then as_root="sudo -n"; fi # nobody is there to type a password
fi

# Word splitting is meant: $as_root and $missing are lists.
if ! $as_root apt-get update -q >/dev/null; then
    echo "warning: apt-get update failed; going on with the package lists as they are" >&2
fi
if ! $as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends $missing </dev/null; then
    echo "error: apt-get could not install:$missing" >&2
    exit 69
fi

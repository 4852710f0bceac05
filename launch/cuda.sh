#!/bin/sh
# cuda.sh - builds the module for GPUs with nvcc, warnings as errors, and runs what needs nvcc but
# no GPU: registers that attention spills. Says so and ends where there is no nvcc.
# Usage: launch/cuda.sh.
set -eu
cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "cuda.sh: skipped: no nvcc here (install the CUDA toolkit, or put it on PATH)"
    exit 0
fi
launch/setup.sh
jobs=$(nproc)
cmake --preset cuda -DTRIREME_WERROR=ON
cmake --build --preset cuda -j "$jobs" --target trireme_cuda

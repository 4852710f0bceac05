#!/bin/sh
# cuda.sh - builds the module for GPUs with nvcc, warnings as errors, and checks that no kernel
# spills registers (test cuda_spills); no GPU is needed. Says so and ends where there is no nvcc.
# Usage: launch/cuda.sh.
set -eu
if [ $# -gt 0 ]; then
    echo "usage: launch/cuda.sh" >&2
    exit 64
fi
cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "cuda.sh: skipped: no nvcc here (install the CUDA toolkit, or put it on PATH)"
    exit 0
fi
launch/setup.sh
jobs=$(nproc)
cmake --preset cuda -DTRIREME_WERROR=ON
cmake --build --preset cuda -j "$jobs" --target trireme_cuda
ctest --test-dir build-cuda -R '^cuda_spills$' --no-tests=error --output-on-failure

#!/bin/sh
# test.sh - builds with warnings as errors and runs all tests but the slow ones.
# Usage: launch/test.sh [options of ctest], as in `launch/test.sh -R metrics` or `-L unit`.
set -eu
cd "$(dirname "$0")/.."

# In CI, with the packages of the tests on several hosts and Slurm; elsewhere those are skipped
# unless `launch/setup.sh --cluster` was run.
if [ "${CI:-}" = true ]; then launch/setup.sh --cluster; else launch/setup.sh; fi
jobs=$(nproc)
cmake --preset release -DTRIREME_WERROR=ON
cmake --build --preset release -j "$jobs"
ctest --preset release -j "$jobs" --no-tests=error "$@"

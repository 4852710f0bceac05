#!/bin/sh
# test.sh - builds with warnings as errors and runs all tests but the slow ones.
# Usage: launch/test.sh [options of ctest], as in `launch/test.sh -R metrics` or `-L unit`.
set -eu
cd "$(dirname "$0")/.."

launch/setup.sh
jobs=$(nproc)
cmake --preset release -DTRIREME_WERROR=ON
cmake --build --preset release -j "$jobs"
ctest --preset release -j "$jobs" --no-tests=error "$@"

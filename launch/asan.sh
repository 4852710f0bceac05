#!/bin/sh
# asan.sh - builds with the address and undefined-behaviour sanitizers and runs the unit tests and
# the tests of whole training steps on one rank. Any finding fails. Usage: launch/asan.sh.
set -eu
cd "$(dirname "$0")/.."

launch/setup.sh
jobs=$(nproc)
cmake --preset asan >/dev/null
cmake --build --preset asan -j "$jobs"
export UBSAN_OPTIONS=print_stacktrace=1
ctest --test-dir build-asan -j "$jobs" --output-on-failure --no-tests=error -L unit
# MPI's plugins are unloaded with memory of theirs still held: leaks are looked for above alone
export ASAN_OPTIONS=detect_leaks=0
ctest --test-dir build-asan --output-on-failure --no-tests=error -R '^test_reference$'

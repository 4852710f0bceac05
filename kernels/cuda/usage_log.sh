#!/bin/sh
# usage_log.sh - runs a compiler. What ptxas tells of each kernel's registers goes to OBJECT.usage,
# which the test cuda_spills reads; the rest of its messages are passed on.
# Usage: usage_log.sh COMPILER ... -o OBJECT ...
set -u
before="" object=""
for word in "$@"; do
    if [ "$before" = -o ]; then object=$word; fi
    before=$word
done
"$@" 2>"$object.usage"
code=$?
grep -vE '^ptxas info|bytes stack frame' "$object.usage" >&2
exit "$code"

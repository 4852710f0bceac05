#!/bin/sh
# quickstart.sh - from a fresh clone to a trained mixture-of-experts model and a sample of its text,
# in a few minutes on two cores. Usage: launch/quickstart.sh [options of `trireme train`].
# If it is stopped, run it again: training goes on from the last checkpoint.
set -eu
cd "$(dirname "$0")/.."

config=configs/quickstart.yaml
name=quickstart runs=runs checkpoints=checkpoints # the config's; options may say otherwise
for option in "$@"; do
    case $option in
    *run.name=*) name=${option#*run.name=} ;;
    *run.directory=*) runs=${option#*run.directory=} ;;
    *checkpoint.directory=*) checkpoints=${option#*checkpoint.directory=} ;;
    esac
done

echo "== 1/5 packages"
launch/setup.sh

echo "== 2/5 build"
cmake --preset release >/dev/null
cmake --build --preset release --target trireme -j "$(nproc)"

echo "== 3/5 text"
launch/text.sh
wc -c data/kjv-train.txt data/kjv-valid.txt | head -n 2

echo "== 4/5 training on 4 ranks"
. launch/env.sh
status=0
mpirun -n 4 build/trireme train "$config" "$@" || status=$?
if [ "$status" -ne 0 ]; then
    if [ "$status" -eq 75 ]; then
        echo "Stopped after saving. Run launch/quickstart.sh again to go on."
    fi
    exit "$status"
fi

echo "== 5/5 a sample"
metrics=$runs/$name/metrics.jsonl
checkpoint=$(ls "$checkpoints/$name"/step-*.h5 2>/dev/null | tail -n 1) || true
if [ -z "$checkpoint" ]; then # --dry-run, for one, makes none
    echo "No checkpoint in $checkpoints/$name: nothing to sample from."
    exit 0
fi
build/trireme generate --checkpoint "$checkpoint" --prompt "In the beginning"

bits=$(sed -n 's/.*"validation_bits_per_byte":\([0-9.e+-]*\).*/\1/p' "$metrics" | tail -n 1)
gzip_bytes=$(gzip -9 -c data/kjv-valid.txt | wc -c)
awk -v bits="$bits" -v gzip="$gzip_bytes" -v bytes="$(wc -c <data/kjv-valid.txt)" 'BEGIN {
    printf "\nHeld-out text: %.3f bits per byte; gzip -9 needs %.3f.\n", bits, 8 * gzip / bytes }'
cat <<END
Metrics:       $metrics
Checkpoint:    $checkpoint
Train longer:  . launch/env.sh
               mpirun -n 4 build/trireme train $config --set training.steps=4000
END

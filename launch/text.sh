#!/bin/sh
# text.sh - makes the text that the small configs train on: data/kjv.txt, 4.4 MB of public-domain
# English from the package bible-kjv, one verse a line; its first 95 % as data/kjv-train.txt, the
# rest as data/kjv-valid.txt. Does nothing when they are there. Usage: launch/text.sh.
set -eu
cd "$(dirname "$0")/.."

if [ -s data/kjv-train.txt ] && [ -s data/kjv-valid.txt ]; then exit 0; fi
if ! command -v bible >/dev/null; then
    echo "error: the program 'bible' is missing: run launch/setup.sh" >&2
    exit 69
fi

# Each file gets its name only when it is whole, the last one last: a run cut short starts over.
mkdir -p data
bible -f gen1:1-rev22:21 >data/kjv.tmp
mv data/kjv.tmp data/kjv.txt
bytes=$(wc -c <data/kjv.txt)
if [ "$bytes" -lt 4000000 ]; then
    echo "error: 'bible' printed only $bytes bytes, 4.4 million were expected" >&2
    exit 65
fi
lines=$(head -c "$((bytes * 95 / 100))" data/kjv.txt | wc -l) # those that end before the cut
head -n "$lines" data/kjv.txt >data/kjv.tmp
mv data/kjv.tmp data/kjv-train.txt
tail -n "+$((lines + 1))" data/kjv.txt >data/kjv.tmp
mv data/kjv.tmp data/kjv-valid.txt

"""Property: the README's first command, on a clean clone, trains in five minutes to at most 2.2
bits per byte of held-out text."""
import json
import re
import subprocess
import time

from conftest import ROOT


def test_quickstart(tmp_path):
    clone = tmp_path / "trireme"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    started = time.time()
    done = subprocess.run(["launch/quickstart.sh"], cwd=clone, text=True, errors="replace",
                          capture_output=True)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in open(clone / "runs/quickstart/metrics.jsonl")]
    training = sum(row["seconds"] for row in rows)
    bits = rows[-1]["validation_bits_per_byte"]
    print(f"{training:.0f} s of training, {time.time() - started:.0f} s in all, {bits:.3f} bits")
    assert bits <= 2.2
    assert training <= 300
    assert re.search(r"gzip", done.stdout) and "In the beginning" in done.stdout

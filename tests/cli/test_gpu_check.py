"""Property: launch/gpu-check takes all its steps and writes their table; a step that fails, hangs
or finds no time is named as such; a pack runs where none of our libraries are. The emulator stands
for the GPU, or scripts for the programs."""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = str(ROOT / "launch/gpu-check")
BUILD = Path(os.environ.get("TRIREME", "")).parent


def check(folder, *words, code=0, script=SCRIPT, prefix=(), timeout=900, **env):
    done = subprocess.run([*prefix, script, *words], cwd=folder, timeout=timeout, text=True,
                          capture_output=True, check=False,
                          env={"PATH": os.environ["PATH"], "HOME": str(folder), **env})
    assert done.returncode == code, (words, done.stdout[-3000:], done.stderr[-2000:])
    return done.stdout + done.stderr


def results(folder):
    """{step: (result, text)} of the report."""
    text = (folder / "gpu-check.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (passed|skipped|FAILED) \| (\d+) \| (.*) \|$", text, re.M)
    return {name: (result, said) for name, result, _, said in rows}


@pytest.mark.parametrize("words", [["--device"], ["--device", "cpu"], ["--seconds", "x"], ["more"],
                                   ["--seconds", "0"], ["--pack"], ["--output", ""]])
def test_wrong_calls(tmp_path, words):
    assert "usage: gpu-check" in check(tmp_path, *words, code=64)


def test_no_gpu_no_build(tmp_path):
    said = check(tmp_path, code=69, PATH=f"{fake_build(tmp_path)}:{os.environ['PATH']}",
                 TRIREME_BUILD=str(tmp_path / "build"))
    assert "error: no GPU here (nvidia-smi: no driver); --device simt takes" in said
    (tmp_path / "clone/launch").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "clone/launch")
    said = check(tmp_path, code=66, script=str(tmp_path / "clone/launch/gpu-check"))
    assert "no build here: cmake --preset cuda && cmake --build --preset cuda;" in said
    assert "--pack DIR" in said
    said = check(tmp_path, "--device", "simt", code=66,
                 script=str(tmp_path / "clone/launch/gpu-check"))
    assert "no build here: cmake --preset release && cmake --build --preset release;" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    assert "name an empty folder" in check(tmp_path, "--pack", str(tmp_path / "mine"), code=64)
    assert (tmp_path / "mine/file").exists()


def fake_build(folder, **scripts):
    """A build whose programs are scripts; also an nvidia-smi without a driver."""
    (folder / "build/tests").mkdir(parents=True, exist_ok=True)
    scripts = {"trireme": "exit 1", "nvidia-smi": "echo no driver; exit 9",
               "tests/test_kernels_loss": "# TRIREME_TEST_MAKERS\necho '[       OK ] a'", **scripts}
    for name, text in scripts.items():
        (folder / "build" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "build" / name).chmod(0o755)
    return folder / "build"


def test_failing_and_hanging_steps(tmp_path):
    build = fake_build(tmp_path, **{
        "tests/test_kernels_moe": "# TRIREME_TEST_MAKERS\necho 'x is off by 0.5'; exit 1",
        "tests/test_kernels_router": "# TRIREME_TEST_MAKERS\necho '  simt skipped: no module'",
        "trireme": "case $* in *tiny-dense*) trap '' TERM; echo $$ >\"$HOME/hangs\"; echo step 3;"
                   " sleep 60 ;; bench*) echo out of memory: 5; exit 70 ;;"
                   " --version) echo trireme 9, commit abc; exit ;; esac; echo error: broken;"
                   " exit 70"})
    said = check(tmp_path, "--device", "simt", "--seconds", "20", code=70,
                 TRIREME_BUILD=str(build))
    found = results(tmp_path)
    assert found["cases: loss"][0] == "passed" and found["cases: loss"][1].startswith("1 cases")
    assert found["cases: moe"] == ("FAILED", "code 1: x is off by 0.5")
    assert found["cases: router"] == ("FAILED", "code 1:   simt skipped: no module")
    assert found["conform"] == ("skipped", "conform is not built")
    assert found["dense training, fp32"][0] == "skipped"
    assert "not done within" in found["dense training, fp32"][1]
    assert found["MoE training, fp32"] == ("skipped", "no time left of 20 s")
    assert "2 failed, 1 not done in time; report: gpu-check.md" in said
    assert "## dense training, fp32\n\n```\nstep 3\n```" in (tmp_path / "gpu-check.md").read_text()
    hung = Path("/proc") / (tmp_path / "hangs").read_text().strip() / "stat"
    assert not hung.exists() or ") Z " in hung.read_text(), "it still runs"
    assert "the emulator (no GPU), trireme 9, commit abc, at most 20 s" in said
    assert "\n\ntrireme 9, commit abc, 2" in (tmp_path / "gpu-check.md").read_text()
    build = fake_build(tmp_path)
    (build / "tests/test_kernels_moe").unlink()
    (build / "tests/test_kernels_router").unlink()
    check(tmp_path, "--device", "simt", code=70, TRIREME_BUILD=str(build))
    assert results(tmp_path)["MoE training, fp32"][0] == "FAILED"
    assert results(tmp_path)["steps of GPT-2 124M"][0] == "FAILED"
    assert "\n\na build of unknown version, 2" in (tmp_path / "gpu-check.md").read_text()


@pytest.mark.parametrize("output", ["missing/report.md", "."])
def test_report_that_cannot_be_written(tmp_path, output):
    """Said before the first step; one that cannot be written any more is printed."""
    build = str(fake_build(tmp_path))
    said = check(tmp_path, "--device", "simt", "--output", output, code=74, TRIREME_BUILD=build)
    assert f"error: {output}: cannot be written" in said and "cases: loss" not in said
    (tmp_path / "missing").mkdir()
    remove = "# TRIREME_TEST_MAKERS\nrm -r $HOME/missing"
    fake_build(tmp_path, **{"tests/test_kernels_loss": remove})
    said = check(tmp_path, "--device", "simt", "--output", "missing/report.md", code=74,
                 TRIREME_BUILD=build)
    assert "| cases: loss | passed |" in said and "the report stands above" in said


def all_passed(folder):
    found = results(folder)
    assert len([name for name in found if name.startswith("cases: ")]) >= 6
    for name, (result, said) in found.items():
        needs = "compute-sanitizer" in name or "PyTorch" in name
        if needs or said == "conform is not built":
            assert result == "skipped", (name, said)
        else:
            assert result == "passed", (name, said)
    for name in ("dense training, fp32", "MoE training, fp32", "dense training, bf16"):
        assert found[name][1].startswith("20 losses, at most "), found[name]
    assert re.fullmatch(r"\d{2,} rows", found["kernels beside their bounds"][1])
    assert "TFLOP/s" in found["steps of a mixture of experts"][1]
    text = (folder / "gpu-check.md").read_text()
    assert text.startswith("# GPU check: the emulator") and "## rows" in text


@pytest.fixture
def emulator():
    if not (BUILD / "libtrireme_simt.so").exists():
        pytest.skip("no module for simt: it needs a C++ compiler")


def test_on_the_emulator(tmp_path, emulator):
    said = check(tmp_path, "--device", "simt", "--seconds", "1800", TRIREME_BUILD=str(BUILD),
                 timeout=1900)
    print(said)
    all_passed(tmp_path)


HIDE = r"""set -e
bare=$1; shift
mkdir $bare
for tool in bash env awk sed grep ps tee tail head sort find mktemp diff paste dirname basename \
    tr cut sleep date ls rm cp wc cat du; do
    command -v $tool
done | xargs ldd | awk '$2 == "=>" { print $3 }' | sort -u | xargs cp -Lt $bare
folder=$(dirname $(ldd /bin/sh | awk '/libc.so/ { print $3 }'))
cp -L $(ldd /bin/sh | awk '/ld-linux/ { print $1 }') $bare
mount --bind $bare $folder
if ls $folder | grep -E 'libmpi|hdf5|dnnl|libgomp|jansson'; then echo still here >&2; exit 1; fi
exec "$@"
"""


def test_pack_where_our_libraries_are_not(tmp_path, emulator):
    """In a mount namespace whose library folder holds what the shell's tools need, no more."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    said = check(tmp_path, "--pack", str(tmp_path / "pack"), TRIREME_BUILD=str(BUILD),
                 TRIREME_PACK_BUILD="no")
    print(said)
    size = re.search(r"pack: (\d+) MB, as \S+pack.tar.gz (\d+) MB; the largest:", said)
    assert int(size[2]) < 60
    said = check(tmp_path, "--device", "simt", "--seconds", "1800",
                 prefix=["unshare", "--mount", "sh", "-c", HIDE, "sh", str(tmp_path / "bare")],
                 script=str(tmp_path / "pack/gpu-check"), PATH="/usr/bin:/bin", timeout=1900)
    print(said)
    all_passed(tmp_path)

"""Property: every command and every Python line of the README works as it stands."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SBATCH = "sbatch --nodes=2 --time=12:00:00 launch/slurm.sbatch configs/tiny-moe.yaml"
GPUS = """cmake --preset cuda && cmake --build --preset cuda -j "$(nproc)"
launch/multi-gpu.sh build-cuda/trireme train configs/gpt2-124m.yaml"""
ELSEWHERE = {"launch/quickstart.sh": "test_quickstart (label slow)", "launch/test.sh": "CI",
             SBATCH: "test_slurm", GPUS: "test_gpus, without a GPU"}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The repository's configs and scripts beside the build under test, and the text."""
    place = tmp_path_factory.mktemp("readme")
    for folder in ("configs", "launch"):
        shutil.copytree(ROOT / folder, place / folder)
    (place / "build").symlink_to(Path(os.environ["TRIREME"]).parent)
    subprocess.run(["launch/text.sh"], cwd=place, check=True)
    (place / "hosts").write_text("localhost slots=4\n")
    return place


def test_shell_and_python_blocks(checkout):
    for block in blocks("sh"):
        if block.strip() in ELSEWHERE:
            print(f"run by {ELSEWHERE[block.strip()]}: {block.strip()}")
            continue
        done = subprocess.run(["sh", "-ec", block], cwd=checkout, text=True, errors="replace",
                              capture_output=True, timeout=240)
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert max(map(len, done.stdout.splitlines()), default=0) <= 100, block
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], cwd=checkout, check=True, timeout=60)


def test_every_file_it_names_is_there():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:src|launch|configs|checkpoints|tests)/[\w./-]+)`", text):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path


def test_its_calls_of_ctest_find_tests(checkout):
    calls = re.findall(r"`(ctest [^`]+)`", (ROOT / "README.md").read_text())
    assert calls
    for call in calls:
        said = subprocess.run(["sh", "-ec", f"{call} -N"], cwd=checkout, text=True, check=True,
                              capture_output=True).stdout
        assert int(re.search(r"Total Tests: (\d+)", said)[1]) > 0, call

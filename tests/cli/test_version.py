"""Property: the program tells the commit it was built from, and only another one makes a build
compile the file that says so."""
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

SCRIPT = ROOT / "src/version.cmake"


def git(folder, *words):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def test_the_program_tells():
    said = subprocess.run([os.environ["TRIREME"], "--version"], capture_output=True, text=True,
                          check=True).stdout
    print(said)
    assert re.fullmatch(r"trireme \d+\.\d+\.\d+(, commit [0-9a-f]{7,}(-dirty)?)?\n", said)
    assert (", commit " in said) == (git(ROOT, "rev-parse", "--show-prefix") == "")


def test_written_when_it_changes(tmp_path):
    if not shutil.which("git"):
        pytest.skip("no git")
    output, sources = tmp_path / "commit.c", tmp_path / "sources"
    sources.mkdir()

    def written():
        subprocess.run(["cmake", "-D", f"SOURCE={sources}", "-D", f"OUTPUT={output}", "-P",
                        str(SCRIPT)], check=True, env={**os.environ,
                                                       "GIT_CEILING_DIRECTORIES": str(tmp_path)})
        return re.search(r'const char tr_commit\[\] = "(.*)";', output.read_text())[1]

    assert written() == ""
    git(sources, "init", "-q")
    (sources / "file").write_text("one")
    git(sources, "add", "file")
    git(sources, "commit", "-q", "-m", "one")
    first = written()
    assert first and git(sources, "rev-parse", "HEAD").startswith(first)
    os.utime(output, (1, 1))
    assert written() == first and output.stat().st_mtime == 1
    (sources / "file").write_text("two")
    assert written() == first + "-dirty" and output.stat().st_mtime > 1
    git(sources, "commit", "-q", "-a", "-m", "two")
    assert written() not in (first, first + "-dirty", "")
    shutil.move(sources, tmp_path / "outer")
    sources = tmp_path / "outer/unpacked"  # as from an archive: the commit is that of other files
    sources.mkdir()
    assert git(sources, "describe", "--always") and written() == ""

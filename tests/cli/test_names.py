"""Property: a run without a name has its config's; one job at a time writes under a name, in the
run's folder or in the checkpoints': a second is refused by all ranks, naming who is there, and what
a killed job has left keeps nobody out."""
import os
import re
import signal
import socket

import pytest
import yaml
from jobs import Job, metrics_text, saved_steps, small

LONG = dict(training=dict(steps=100000, evaluate_every=0), checkpoint=dict(every=0))


def unnamed(lab, path):
    config = yaml.safe_load((lab.path / small(lab, "named")).read_text())
    del config["run"]["name"]
    (lab.path / path).write_text(yaml.safe_dump(config))
    return path


def locks(lab):
    return sorted(p.name for p in lab.path.rglob(".*.lock"))


def test_the_name_is_the_config_s(lab):
    (lab.path / "here").mkdir()
    lab.train(unnamed(lab, "here/my.small.yaml"), "training.steps=2")
    assert len(lab.rows("my.small")) == 2 and saved_steps(lab, "my.small") == [2]
    lab.train(unnamed(lab, "here/my.small.yaml"), "training.steps=2", "run.name=other")
    assert len(lab.rows("other")) == 2
    assert sorted(os.listdir(lab.path / "runs")) == ["my.small", "other"]
    odd = unnamed(lab, os.fsdecode(b"here/\xff.yaml"))
    assert "run.name: the file's name is no UTF-8 text" in lab.train(odd, code=64).stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["both", "runs", "checkpoints"])
def test_a_second_job_is_refused(lab, ranks, where):
    config = small(lab, "run", **LONG)
    job = Job(lab, "run", config, ranks=ranks)
    assert job.wait_for_rows(2)
    elsewhere = {"both": [], "runs": ["checkpoint.directory=elsewhere"],
                 "checkpoints": ["run.directory=elsewhere"]}[where]
    said = lab.train(config, *elsewhere, ranks=ranks, code=64).stderr
    folder = "checkpoints/run" if where == "checkpoints" else "runs/run"
    assert said.count("error: ") == 1 and f"error: {folder} is in use by another job" in said
    assert f"process {job.pid(0)} on host {socket.gethostname()};" in said and "run.name" in said
    lab.train(config, "run.name=other", "training.steps=2", ranks=ranks)
    before = job.rows()
    assert job.wait_for_rows(before + 2)
    job.send(signal.SIGUSR1)
    job.finish(75)
    done = lab.train(config, "training.steps=1", ranks=ranks)
    assert f"already finished: step {len(lab.rows('run'))} of 1" in done.stdout
    assert locks(lab) == [] and not (lab.path / "elsewhere").exists()


def test_one_folder_for_both(lab):
    config = small(lab, "run", run=dict(directory="out"), checkpoint=dict(directory="./out"))
    lab.train(config, "training.steps=2")
    assert locks(lab) == []


def test_never_holds_its_name_through_the_move(lab):
    config = small(lab, "run", **LONG)
    lab.train(config, "training.steps=2")
    job = Job(lab, "run", config, resume="never")
    while not re.search("moved checkpoints/run", job.text()):
        assert job.process.poll() is None
    assert job.wait_for_rows(2)
    lab.train(config, code=64)
    job.send(signal.SIGUSR1)
    job.finish(75)


def test_a_killed_job_keeps_nobody_out(lab):
    config = small(lab, "run", **LONG)
    job = Job(lab, "run", config, ranks=2)
    assert job.wait_for_rows(2)
    job.kill_all()
    assert locks(lab) == [".run.lock", ".run.lock"]
    lab.train(config, "training.steps=3", ranks=2)
    assert len(metrics_text(lab, "run")) == 3 and locks(lab) == []

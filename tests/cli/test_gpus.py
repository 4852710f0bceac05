"""Property: launch/multi-gpu.sh starts one rank a GPU, each bound to the cores near its own, and
launch/slurm.sbatch one task a GPU that sees all GPUs of its node; what cannot be is refused with a
remedy before anything starts. No GPU is needed: nvidia-smi is a script here, and so is mpirun or
srun where only what they are asked for matters."""
import os
import re
import subprocess

import pytest
from cluster import Cluster, NotHere
from conftest import ROOT

SCRIPT = str(ROOT / "launch/multi-gpu.sh")
UUID = ["GPU-aaaa", "GPU-aabb", "GPU-cccc", "GPU-dddd"]
BUS = ["00000000:3B:00.0", "00000000:5E:00.0", "00000000:AF:00.0", "00000001:D8:00.0"]
SYSFS = ["0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "0001:d8:00.0"]
NEAR = ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]
RECORD = '#!/bin/sh\nfor word in "$@"; do echo "word $word"; done\nenv | sort\n'


class Machine:
    """A folder with programs that come first on PATH, and the PCI devices of four GPUs."""

    def __init__(self, path):
        self.path = path
        self.env = {k: v for k, v in os.environ.items()
                    if not k.startswith(("CUDA_", "NCCL_", "OMP_", "SLURM_", "TRIREME_"))}
        self.env.update(PATH=f"{path}:{os.environ['PATH']}", SYSFS_PCI_DEVICES=str(path / "pci"))
        self.program("trireme", RECORD)
        self.gpus(4)
        for bus, cores in zip(SYSFS, NEAR):
            (path / "pci" / bus).mkdir(parents=True)
            (path / "pci" / bus / "local_cpulist").write_text(cores + "\n")

    def program(self, name, text):
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def gpus(self, count):
        lines = "\n".join(f"{i}, {UUID[i]}, {BUS[i]}" for i in range(count)) or "No devices found"
        self.program("nvidia-smi", f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")

    def call(self, *words, code=0, **env):
        done = subprocess.run(words, cwd=self.path, env={**self.env, **env}, timeout=60, text=True,
                              capture_output=True, check=False)
        assert done.returncode == code, (words, done)
        return done

    def asked(self, *words, **env):
        """What mpirun is asked for: its words, and its environment."""
        self.program("mpirun", RECORD)
        text = self.call(SCRIPT, *words, **env).stdout
        settings = dict(re.findall(r"^([A-Z]\w*)=(.*)$", text, re.M))
        return re.findall(r"^word (.*)$", text, re.M), settings


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_one_rank_a_gpu(machine):
    words, env = machine.asked("./trireme", "train", "a b.yaml", "--set", "training.steps=5")
    assert words[:3] == ["-n", "4", "--bind-to"] and words[3] == "none"
    assert words[5:7] == ["--near", " ".join(NEAR)]
    assert words[7:] == ["./trireme", "train", "a b.yaml", "--set", "training.steps=5",
                         "--set", "run.device=cuda"]
    assert env["NCCL_DEBUG"] == "WARN" and env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "NCCL_SOCKET_IFNAME" not in env


def test_settings_that_are_given_stay(machine):
    words, env = machine.asked("-n", "2", "./trireme", "verify", "x", "--set=run.device=simt",
                               NCCL_DEBUG="INFO", TRIREME_NETWORK="eth7", TRIREME_BIND="none")
    assert words[:2] == ["-n", "2"] and words[6:] == ["- -", "./trireme", "verify", "x",
                                                      "--set=run.device=simt"]
    assert env["NCCL_DEBUG"] == "INFO" and env["NCCL_SOCKET_IFNAME"] == "eth7"
    _, env = machine.asked("./trireme", "train", "x", TRIREME_NETWORK="10.1.0.0/16")
    assert "NCCL_SOCKET_IFNAME" not in env
    words, _ = machine.asked("./trireme", "help", "config")
    assert words[-2:] == ["help", "config"]


@pytest.mark.parametrize("visible, ranks, near", [
    ("2,0", "2", f"{NEAR[2]} {NEAR[0]}"), ("3", "1", NEAR[3]),
    ("GPU-cc,GPU-aab", "2", f"{NEAR[2]} {NEAR[1]}"), ("MIG-1,MIG-2,0", "3", f"- - {NEAR[0]}")])
def test_visible_devices(machine, visible, ranks, near):
    words, _ = machine.asked("./trireme", "train", "x", CUDA_VISIBLE_DEVICES=visible)
    assert words[1] == ranks and words[6] == near, words


REFUSED = [  # GPUs, CUDA_VISIBLE_DEVICES, words, code, text
    (4, None, [], 64, "usage:"),
    (4, None, ["-n"], 64, "usage:"),
    (4, None, ["-n", "2"], 64, "usage:"),
    (4, None, ["--help"], 64, "usage:"),
    (4, None, ["--near", "0", "./trireme"], 64, "usage:"),
    (4, None, ["-n", "0", "./trireme"], 64, "-n 0: RANKS"),
    (4, None, ["-n", "two", "./trireme"], 64, "-n two: RANKS"),
    (4, None, ["-n", "5", "./trireme"], 64, "-n 5: there are 4 GPUs to use"),
    (4, "1", ["-n", "2", "./trireme"], 64, "-n 2: there are 1 GPUs to use"),
    (4, "1,9", ["./trireme"], 64, "no single GPU 9; it lists 0 (GPU-aaaa) 1 (GPU-aabb) 2"),
    (4, "GPU-aa", ["./trireme"], 64, "no single GPU GPU-aa;"),
    (4, "", ["./trireme"], 69, "CUDA_VISIBLE_DEVICES is empty, which hides them; unset it"),
    (0, None, ["./trireme"], 69, "error: no GPU: nvidia-smi lists none. `nvidia-smi` must list"),
    (4, None, ["./none"], 66, "./none: no such program here; build it"),
    (4, None, ["."], 66, ".: no such program here"),
]


@pytest.mark.parametrize("gpus, visible, words, code, text", REFUSED)
def test_refusals(machine, gpus, visible, words, code, text):
    machine.gpus(gpus)
    machine.program("mpirun", "#!/bin/sh\necho started\n")
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = machine.call(SCRIPT, *words, code=code, **env)
    assert text in done.stderr and "started" not in done.stdout, done


def test_driver_that_does_not_work(machine):
    machine.program("nvidia-smi", "#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    done = machine.call(SCRIPT, "./trireme", "train", "x", code=69)
    assert "nvidia-smi says: NVIDIA-SMI has failed. " in done.stderr
    assert "mpirun -n RANKS ./trireme" in done.stderr  # the remedy


def test_ranks_bind_themselves(machine):
    """By the real mpirun. Cores that this machine lacks bind nothing."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: nothing to bind to")
    lists = [str(cores[0]), str(cores[1]), f"{cores[0]},{cores[1]}", "4000-4007"]
    for bus, text in zip(SYSFS, lists):
        (machine.path / "pci" / bus / "local_cpulist").write_text(text + "\n")
    machine.program("trireme", "#!/bin/sh\n"
                    'echo "rank $OMPI_COMM_WORLD_LOCAL_RANK threads ${OMP_NUM_THREADS:-none}'
                    ' cores $(taskset -cp $$ | sed "s/.*: //") [$2]"\n')
    said = machine.call(SCRIPT, "./trireme", "train", "two words").stdout
    found = dict(re.findall(r"^rank (\d) (threads .*)$", said, re.M))
    pair = found["2"].split()[3]
    assert pair in (lists[2], lists[2].replace(",", "-"))
    assert found["0"] == f"threads 1 cores {cores[0]} [two words]"
    assert found["1"] == f"threads 1 cores {cores[1]} [two words]"
    assert found["2"] == f"threads 2 cores {pair} [two words]"
    assert found["3"].startswith("threads none cores ")
    for bus in SYSFS:  # four share two cores; what is set stays
        (machine.path / "pci" / bus / "local_cpulist").write_text(lists[2] + "\n")
    assert machine.call(SCRIPT, "./trireme", "train", "x").stdout.count("threads 1 ") == 4
    said = machine.call(SCRIPT, "./trireme", "train", "x", OMP_NUM_THREADS="3").stdout
    assert said.count("threads 3 ") == 4


# --- Slurm ----------------------------------------------------------------------------------------

def batch(machine, *words, code=0, **env):
    """launch/slurm.sbatch as Slurm starts it, with an srun that writes down what it is asked."""
    for name in ("srun", "mpirun"):
        machine.program(name, "#!/bin/sh\n" + f'echo "{name} $*"\n')
    machine.program("squeue", "#!/bin/sh\necho COMPLETING\n")
    job = dict(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_JOB_NUM_NODES="2",
               SLURM_JOB_NODELIST="n[1-2]", **{"TRIREME": "./trireme", **env})
    if not (machine.path / "launch").exists():
        (machine.path / "launch").symlink_to(ROOT / "launch")
    done = machine.call("bash", "launch/slurm.sbatch", *words, code=code, **job)
    return done.stdout + done.stderr


def test_slurm_gpus(machine):
    said = batch(machine, "x.yaml", SLURM_GPUS_ON_NODE="2", SLURM_NTASKS_PER_NODE="2")
    assert ("srun --mpi=pmix --kill-on-bad-exit=1 --distribution=block:block "
            "./trireme train x.yaml --set run.device=cuda\n") in said
    assert "4 ranks of ./trireme on n[1-2], 2 GPUs a node, by srun" in said
    said = batch(machine, "x.yaml", "--set", "run.device=simt", SLURM_GPUS_ON_NODE="2",
                 TRIREME_LAUNCHER="mpirun")
    assert "mpirun ./trireme train x.yaml --set run.device=simt\n" in said
    said = batch(machine, "x.yaml", SLURM_GPUS_ON_NODE="4", code=64)
    assert "2 tasks a node and 4 GPUs; a rank needs a GPU of its own: give --ntasks" in said


def test_slurm_without_gpus(machine):
    said = batch(machine, "x.yaml")
    assert "srun --mpi=pmix --kill-on-bad-exit=1 ./trireme train x.yaml\n" in said
    assert "4 ranks of ./trireme on n[1-2], by srun" in said


def test_slurm_chooses_the_build(machine):
    """That with a module for GPUs where it is there and the job has some; or what it is told."""
    gpus = dict(SLURM_GPUS_ON_NODE="2", SLURM_NTASKS_PER_NODE="2")
    (machine.path / "build").mkdir()
    machine.program("build/trireme", RECORD)
    assert "=1 build/trireme train x.yaml\n" in batch(machine, "x.yaml", TRIREME="")
    assert " build/trireme train x.yaml --set run" in batch(machine, "x.yaml", TRIREME="", **gpus)
    (machine.path / "build-cuda").mkdir()
    machine.program("build-cuda/trireme", RECORD)
    said = batch(machine, "x.yaml", TRIREME="", **gpus)
    assert " build-cuda/trireme train x.yaml --set run.device=cuda\n" in said
    assert "4 ranks of build-cuda/trireme on" in said
    assert " ./trireme train x.yaml --set run" in batch(machine, "x.yaml", **gpus)
    assert "=1 build/trireme train x.yaml\n" in batch(machine, "x.yaml", TRIREME="")


def test_tasks_see_all_gpus(machine):
    """On a real Slurm whose GPUs are device files."""
    try:
        cluster = Cluster(nodes=1, gpus=2)
    except NotHere as reason:
        pytest.skip(f"no Slurm here: {reason}")
    try:
        (machine.path / "launch").symlink_to(ROOT / "launch")
        machine.program("trireme", "#!/bin/sh\n"
                        'echo "task $SLURM_LOCALID sees ${CUDA_VISIBLE_DEVICES-all}: $*"\n')
        for options in (["--gpus-per-node=2"], ["--gpus-per-task=1"],
                        ["--gpus-per-node=2", "--gpu-bind=single:1"]):
            said = cluster.call(
                "sbatch", "--wait", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1",
                "--output=said", *options, "launch/slurm.sbatch", "x.yaml", cwd=machine.path,
                env={"TRIREME": "./trireme"}, check=False)
            text = (machine.path / "said").read_text()
            (machine.path / "said").unlink()
            for task in "01":
                assert f"task {task} sees 0,1: train x.yaml --set run.device=cuda\n" in text, \
                    (options, said, text)
            assert "the trainer ended with code 0" in text
    finally:
        cluster.close()

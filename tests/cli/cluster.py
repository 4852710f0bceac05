"""A Slurm cluster on this machine: a controller and nodes with host names, shared memory and PMIx
folders of their own, all in the foreground, with ports and keys of their own. It ends with close.
Needs root, and the packages that launch/setup.sh --cluster installs."""
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "munged", "unshare"
CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
GresTypes=gpu
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=10
SlurmdTimeout=60
SlurmctldTimeout=60
PropagateResourceLimitsExcept=ALL
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class NotHere(Exception):
    """This machine does not allow it; says why."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """Nodes n1, n2, ... with room for `cpus` tasks each, however few cores there are, and `gpus`
    device files that pass for GPUs."""

    def __init__(self, nodes=2, cpus=8, gpus=0):
        missing = [p for p in PROGRAMS if not shutil.which(p)]
        if missing:
            raise NotHere(f"not installed: {' '.join(missing)} (launch/setup.sh --cluster)")
        if os.geteuid() != 0:
            raise NotHere("needs root")
        self.folder = Path(tempfile.mkdtemp(prefix="trireme-slurm-"))
        self.started = []
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "TRIREME_NETWORK": "lo"}
        try:
            self.build(nodes, cpus, gpus)
        except BaseException:
            self.close()
            raise

    def build(self, nodes, cpus, gpus):
        f, host = self.folder, socket.gethostname()
        f.chmod(0o755)
        (f / "state").mkdir()
        (f / "pmix").mkdir()
        lines = [f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
                 f"CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN"
                 for i in range(1, nodes + 1)]
        config = CONFIG.format(folder=f, host=host, port=free_port())
        for i in range(gpus):
            os.mknod(f / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        if gpus:
            (f / "gres.conf").write_text(f"Name=gpu File={f}/gpu[0-{gpus - 1}]\n")
        (f / "slurm.conf").write_text(config.replace("PartitionName", "\n".join(lines) +
                                                     "\nPartitionName"))
        (f / "mpi.conf").write_text(f"PMIxCliTmpDirBase={f}/pmix\n")
        (f / "munge.key").write_bytes(os.urandom(128))
        (f / "munge.key").chmod(0o400)
        self.start("munged", "munged", "--foreground", "--force", f"--socket={f}/munge",
                   f"--key-file={f}/munge.key", f"--pid-file={f}/munge.pid",
                   f"--seed-file={f}/munge.seed")
        self.wait_for(lambda: (f / "munge").exists(), "munged")
        self.start("slurmctld", "slurmctld", "-D", "-c")
        for i in range(1, nodes + 1):
            self.start(f"slurmd-n{i}", "unshare", "--mount", "--uts", "--ipc", "sh", "-ec",
                       f"hostname n{i}; mount -t tmpfs tmpfs {f}/pmix; "
                       f"mount -t tmpfs tmpfs /dev/shm; exec slurmd -D -N n{i}")
            (f / f"spool-n{i}").mkdir()
        self.wait_for(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D", check=False)
                      .strip() == str(nodes), "the nodes")

    def start(self, name, *words):
        with open(self.folder / f"{name}.log", "w") as log:
            self.started.append(subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment}))

    def wait_for(self, ready, what):
        until = time.monotonic() + 30
        while not ready():
            if time.monotonic() > until or any(p.poll() is not None for p in self.started):
                logs = "".join(f"{p.name}: {p.read_text()[-400:]}\n"
                               for p in sorted(self.folder.glob("*.log")))
                raise NotHere(f"{what} did not start\n{logs}")
            time.sleep(0.05)

    def call(self, *words, check=True, cwd=None, env=None):
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd,
                              env={**os.environ, **self.environment, **(env or {})})
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, number):
        """What Slurm says of a job: a dictionary such as {"JobState": "RUNNING", ...}."""
        text = self.call("scontrol", "show", "job", str(number), "-o")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def close(self):
        if shutil.which("scancel") and (self.folder / "slurmctld.pid").exists():
            self.call("scancel", "--signal=KILL", "--full", "-u", "root", check=False)
            self.call("scancel", "-u", "root", check=False)
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self.started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

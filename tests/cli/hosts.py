"""Several hosts on one machine: each has its own network, host name, shared memory and processes;
what they share is the disk. A bridge joins them.

    python3 tests/cli/hosts.py HOSTS [--slots RANKS] [--rate 1gbit] -- COMMAND ...

runs a command on the first host, with links of a rate. $HOSTS names the file for launch/hosts.sh,
which reaches the others from there. Needs Linux, root, and the programs ip, tc, unshare, nsenter.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETWORK = "10.77.0"
PROGRAMS = "ip", "tc", "unshare", "nsenter"


class NotHere(Exception):
    """This machine does not allow it; says why."""


def call(*words):
    """Runs a program of the system; what it refuses, the machine does not allow."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotHere(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Hosts:
    """Hosts h1, h2, ... The first shares its process numbers with the machine, so that mpirun can
    enter the others from it; they have numbers of their own, and end when their first process does.
    """

    def __init__(self, count, slots=2, rate=None):
        self.pids, self.started = {}, []
        self.folder = Path(tempfile.mkdtemp(prefix="trireme-hosts-"))
        try:
            self.build(count, slots, rate)
        except BaseException:
            self.close()
            raise

    def build(self, count, slots, rate):
        missing = [p for p in PROGRAMS if not shutil.which(p)]
        if missing or os.geteuid() != 0:
            raise NotHere("needs root" if not missing else f"not installed: {' '.join(missing)}")
        names = [f"h{i}" for i in range(1, count + 1)]
        hosts = "".join(f"{NETWORK}.{i} h{i}\n" for i in range(1, count + 1))
        (self.folder / "etc-hosts").write_text("127.0.0.1 localhost\n" + hosts)
        (self.folder / "hosts").write_text("".join(f"{n} slots={slots}\n" for n in names))
        self.switch = self.start("switch", "--net")
        self.inside(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self.inside(self.switch, "ip", "link", "set", "br0", "up")
        for i, name in enumerate(names, 1):
            own = () if i == 1 else ("--pid", "--fork", "--kill-child", "--mount-proc")
            pid = self.pids[name] = self.start(name, "--net", "--uts", "--ipc", "--mount", *own)
            call("ip", "link", "add", "eth0", "netns", str(pid), "type", "veth", "peer", "name",
                 f"to-{name}", "netns", str(self.switch))
            self.inside(self.switch, "ip", "link", "set", f"to-{name}", "master", "br0", "up")
            self.inside(pid, "ip", "link", "set", "lo", "up")
            self.inside(pid, "ip", "addr", "add", f"{NETWORK}.{i}/24", "dev", "eth0")
            self.inside(pid, "ip", "link", "set", "eth0", "up")
            if rate:
                self.inside(pid, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate,
                            "burst", "256kb", "latency", "50ms")
        self.write_agent()

    def start(self, name, *options):
        """A first process in namespaces of its own; returns its number."""
        ready = self.folder / f"{name}.ready"
        own = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; " \
              f"mount --bind {self.folder}/etc-hosts /etc/hosts; "
        script = own if "--uts" in options else ""
        process = subprocess.Popen(
            ["unshare", *options, "sh", "-ec", f"{script} : >{ready}; exec sleep infinity"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        until = time.monotonic() + 10
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise NotHere(f"unshare {' '.join(options)}: {process.stderr.read().strip()}")
            time.sleep(0.01)
        return self.first_process(process)

    @staticmethod
    def first_process(process):
        """Of the new namespaces: what unshare became, or its child; None if that is gone."""
        if process.poll() is not None:
            return None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else process.pid

    @staticmethod
    def inside(pid, *words):
        """Runs a program of the system in a host's network; returns what it says."""
        return call("nsenter", "-t", str(pid), "--net", *words)

    def write_agent(self):
        """What stands in for ssh: AGENT HOST COMMAND ..."""
        cases = "".join(f"{n}) pid={p} own={'' if n == 'h1' else '--pid'} ;;\n"
                        for n, p in self.pids.items())
        self.agent = self.folder / "agent"
        self.agent.write_text(
            "#!/bin/sh\nhost=$1\nshift\ncase $host in\n" + cases +
            "*) echo no such host: $host >&2; exit 255 ;;\nesac\n"
            "exec nsenter -t $pid --net --uts --ipc --mount $own -- /bin/sh -c \"$*\"\n")
        self.agent.chmod(0o755)

    def command(self, folder, *words):
        """What runs a command on the first host, in a folder."""
        pid = str(self.pids["h1"])
        there = 'cd "$1" && shift && exec "$@"'
        return ["nsenter", "-t", pid, "--net", "--uts", "--ipc", "--mount", "--", "sh", "-c", there,
                "sh", str(folder), *words]

    def environment(self):
        return {"OMPI_MCA_plm_rsh_agent": str(self.agent), "TRIREME_NETWORK": "eth0"}

    def power_off(self, name):
        os.kill(self.pids[name], 9)

    def cut(self, name):
        self.inside(self.switch, "ip", "link", "set", f"to-{name}", "down")

    def close(self):
        for process in self.started:
            first = self.first_process(process)
            if first is not None:  # its parent ends with it
                os.kill(first, 9)
            process.wait()
            process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts", type=int)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--rate")
    parser.add_argument("command", nargs="+")
    a = parser.parse_args()
    lab = Hosts(a.hosts, a.slots, a.rate)
    try:
        env = {**os.environ, **lab.environment(), "HOSTS": str(lab.folder / "hosts")}
        return subprocess.run(lab.command(os.getcwd(), *a.command), env=env, check=False).returncode
    finally:
        lab.close()


if __name__ == "__main__":
    sys.exit(main())

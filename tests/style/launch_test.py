"""Property: launch/env.sh works in every shell that is here, under set -eu, any number of times,
sets nothing that is set already, and no script in launch/ has a syntax error."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHELLS = [shell for shell in ("sh", "dash", "bash", "busybox") if shutil.which(shell)]


def run(shell, *arguments, **variables):
    """Standard output of a shell that knows nothing but PATH and these variables."""
    command = [shell, "sh"] if shell == "busybox" else [shell]
    done = subprocess.run(command + list(arguments), cwd=ROOT, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], **variables}, check=False)
    assert done.returncode == 0 and done.stderr == "", (shell, arguments, done)
    return done.stdout


def settings(shell, script, **variables):
    lines = run(shell, "-euc", script + "; env", **variables).splitlines()
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines
            if line.startswith(("OMPI_", "OMP_", "HDF5_"))}


class Launch(unittest.TestCase):
    def test_every_shell_gets_the_same(self):
        first = settings("sh", ". launch/env.sh")
        for shell in SHELLS:
            for script in (". launch/env.sh", ". launch/env.sh; . launch/env.sh"):
                self.assertEqual(settings(shell, script), first, shell)
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                     "OMPI_MCA_rmaps_base_oversubscribe", "OMPI_MCA_mpi_yield_when_idle"):
            self.assertEqual(first[name], "1")
        self.assertEqual(first["OMPI_MCA_fbtl_posix_read_datasieving"], "0")

    def test_what_is_set_stays(self):
        names = settings("sh", ". launch/env.sh")
        mine = {name: "7" for name in names}
        for shell in SHELLS:
            self.assertEqual(settings(shell, ". launch/env.sh", **mine), mine, shell)

    def test_wrong_calls_are_named(self):
        def refused(text, *words):
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60,
                                  env={"PATH": os.environ["PATH"]}, check=False)
            self.assertEqual(done.returncode, 64, (words, done))
            self.assertIn(text, done.stderr)

        refused("sbatch launch/slurm.sbatch CONFIG", "launch/slurm.sbatch", "x.yaml")
        with tempfile.TemporaryDirectory() as folder:
            hosts = pathlib.Path(folder) / "hosts"

            def hosts_refused(text, lines, *words):
                hosts.write_text(lines)
                refused(text, "launch/hosts.sh", str(hosts), *words, "launch/env.sh")

            for number in ("0", "-3", "x", ""):
                hosts_refused(f"-n {number}: RANKS", "localhost slots=2\n", "-n", number)
            hosts_refused("no machine in it", "# none\n\n")
            for line in ("slots=two", "slots=", "slots=0", "slot=2", "slots=2 slot=3", "2", "=2"):
                hosts_refused("node1 " + line, f"localhost slots=2\nnode1\t{line} # ?\n")
            for name in ("*", "node1,node2", "$HOME", "node1;"):
                hosts_refused(name, f"localhost\n{name} slots=2\n")

    def test_hosts_in_any_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder) / "it's $HOME \"here\""
            place.mkdir()
            for name, text in (("the program's", "exit 1"), ("../mpirun", 'echo "$@"'),
                               ("../agent", 'shift; cd /; exec sh -c "$*"')):
                (place / name).write_text(f"#!/bin/sh\n{text}\n")
                (place / name).chmod(0o755)
            (place / "hosts").write_text("far slots = 2 max_slots=3\nuser@node-1.x\n\n[fe80::1]\n")
            words = str(ROOT / "launch/hosts.sh"), "hosts", "./the program's", "train"
            done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False,
                                  timeout=60,
                                  env={"PATH": f"{folder}:{os.environ['PATH']}",
                                       "OMPI_MCA_plm_rsh_agent": f"{folder}/agent"})
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("--hostfile hosts", done.stdout)
            self.assertIn("./the program's train", done.stdout)

    def test_syntax(self):
        scripts = sorted((ROOT / "launch").glob("*.sh"))
        self.assertTrue(scripts)
        for script in ("slurm.sbatch", "gpu-check"):
            run("bash", "-n", str(ROOT / "launch" / script))
            self.assertTrue(os.access(ROOT / "launch" / script, os.X_OK), script)
        for script in scripts:
            for shell in SHELLS:
                run(shell, "-n", str(script))
            runs = os.access(script, os.X_OK)
            self.assertEqual(runs, script.name != "env.sh", f"{script.name}: executable or not")


if __name__ == "__main__":
    unittest.main()

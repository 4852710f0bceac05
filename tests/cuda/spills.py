"""Property: ptxas keeps the attention kernels on tensor cores in registers, on every architecture
that the module for GPUs is built for. Prints registers by kernel, fails on any byte spilled.
Usage: spills.py NVCC REPOSITORY ARCHITECTURE... (80 90a 100), further flags from NVCC_FLAGS."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

FILES = ("attention_bf16_forward.cu", "attention_bf16_backward.cu")
KERNEL = re.compile(r"Compiling entry function '(\S+)' for")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def name_of(symbol):
    """dq_kernel<64, 64> from its mangled name."""
    name = re.search(r"\d+([a-z_]+kernel)", symbol)
    widths = re.findall(r"Li(\d+)E", symbol)
    return f"{name[1] if name else symbol}<{', '.join(widths)}>"


def usage(nvcc, root, file, architecture):
    """(kernel, registers, bytes spilled) of each kernel of a file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++17", f"-arch=sm_{architecture}", f"-I{root}", f"-I{root / 'src'}",
                   "-Xptxas", "-v", "-cubin", "-o", os.path.join(folder, "out.cubin"),
                   *os.environ.get("NVCC_FLAGS", "").split(), str(root / "kernels/cuda" / file)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    kernel, spilled = None, 0
    for line in (run.stdout + run.stderr).splitlines():
        if found := KERNEL.search(line):
            kernel = name_of(found[1])
        elif found := SPILLS.search(line):
            spilled = int(found[1]) + int(found[2])
        elif (found := REGISTERS.search(line)) and kernel:
            yield kernel, int(found[1]), spilled
            kernel = None


def main():
    nvcc, root, architectures = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    kernels, bad = 0, 0
    for architecture in architectures:
        for file in FILES:
            for kernel, registers, spilled in usage(nvcc, root, file, architecture):
                kernels += 1
                bad += spilled > 0
                print(f"sm_{architecture:5} {kernel:28} {registers:3} registers, "
                      f"{spilled} bytes spilled", flush=True)
    print(f"{kernels} kernels, {bad} with spills")
    return 1 if bad or kernels != 18 * len(architectures) else 0


if __name__ == "__main__":
    sys.exit(main())

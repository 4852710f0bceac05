"""Property: ptxas keeps what every kernel computes with in registers, in every file of kernels/cuda
and on every architecture that the module for GPUs is built for. Reads what ptxas said while the
module was built (OBJECT.usage, by kernels/cuda/usage_log.sh). Prints registers by kernel, fails on
any byte spilled, and on a file or an architecture without kernels.
Usage: spills.py REPOSITORY OBJECT..."""
import pathlib
import re
import subprocess
import sys

KERNEL = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def plain(symbols):
    """Names of kernels without parameters, as in dq_kernel<64, 64>, from mangled ones."""
    run = subprocess.run(["c++filt", "-p"], input="\n".join(symbols), capture_output=True,
                         text=True, check=True)
    return run.stdout.splitlines()


def usage(log):
    """[kernel, architecture, registers, bytes of stack, bytes spilled] of each kernel of a log."""
    found = []
    for line in log.read_text().splitlines():
        if kernel := KERNEL.search(line):
            found.append([kernel[1], kernel[2], 0, 0, 0])
        elif (spills := SPILLS.search(line)) and found:
            found[-1][3] += int(spills[1])
            found[-1][4] += int(spills[2]) + int(spills[3])
        elif (registers := REGISTERS.search(line)) and found:
            found[-1][2] = int(registers[1])
    for kernel, name in zip(found, plain([kernel[0] for kernel in found])):
        kernel[0] = name
    return found


def main():
    files = sorted((pathlib.Path(sys.argv[1]) / "kernels/cuda").glob("*.cu"))
    logs = {pathlib.Path(name).stem: pathlib.Path(name + ".usage") for name in sys.argv[2:]}
    kernels = {file.name: usage(logs[file.name]) for file in files}
    architectures = {kernel[1] for found in kernels.values() for kernel in found}
    bad = 0
    for name, found in kernels.items():
        for missing in architectures - {kernel[1] for kernel in found}:
            print(f"{name}: no kernels for sm_{missing}")
            bad += 1
        for kernel, architecture, registers, stack, spilled in found:
            bad += spilled > 0 or registers == 0
            print(f"{name:26} sm_{architecture:5} {registers:3} registers, "
                  f"{stack} bytes of stack, {spilled} spilled: {kernel}")
    print(f"{sum(map(len, kernels.values()))} kernels in {len(files)} files for "
          f"sm_{', sm_'.join(sorted(architectures))}: {bad} bad")
    return 1 if bad or not architectures else 0


if __name__ == "__main__":
    sys.exit(main())

"""House rules that a program can check. Usage: check.py REPOSITORY. Prints FILE:LINE: what is wrong
and what would be right; exit 1 if anything is. Python's standard library only."""
import pathlib
import re
import shutil
import subprocess
import sys

# A file includes files of its own folder and of lower floors; ACROSS lists what else is allowed.
FLOORS = {"base": 0, "config": 1, "dist": 1, "kernels": 2, "model": 3, "data": 3,
          "train": 4, "checkpoint": 4, "plan": 4, "observe": 4, "bench": 5, "main": 6}
ACROSS = {"train": {"checkpoint", "observe"}, "plan": {"train"}}

MAX_LINES = 700
MAX_COLUMNS = 100
C_FILES = {".c", ".h", ".cc", ".cu", ".cuh"}
TEXT_FILES = C_FILES | {".py", ".sh", ".cmake", ".txt", ".yaml"}
FOLDERS = ("src", "kernels", "tests", "launch", "configs")

# Split so that this file does not break its own rules.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|^\s*#\s*if\s+0\b")
MACHINE_PATH = re.compile(r"(?<![\w./])/(wo" r"rk|ho" r"me|ro" r"ot|Us" r"ers)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')


def read(path):
    return path.read_bytes().decode("utf-8", "replace")


def sources(root):
    """(path, its name in the repository) of every text file the rules are for."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if (path.suffix in TEXT_FILES or folder == "launch") and path.is_file():
                yield path, path.relative_to(root).as_posix()


def floor_of(name):
    """The floor of src/FLOOR/x.c, kernels/... and src/x.c; None for tests and the like."""
    parts = name.split("/")
    if parts[0] == "kernels":
        return "kernels"
    if parts[0] != "src":
        return None
    return parts[1] if len(parts) > 2 else "main"


def check_include(root, name, floor, header):
    """What is wrong with `#include "header"` in a file of that floor, or None."""
    first = header.split("/")[0]
    target = first if "/" in header else "main"
    if target == "tests":
        return f'"{header}": the program does not include tests'
    place = root / ("" if target == "kernels" else "src") / header
    if target not in FLOORS or not place.is_file():
        return (f'"{header}" is no file under src/ or kernels/: write "folder/name.h", '
                "and <name.h> for what is not ours")
    below = FLOORS[target] < FLOORS[floor]
    if target == floor or below or target in ACROSS.get(floor, ()):
        return None
    return (f'"{header}": {floor} (floor {FLOORS[floor]}) may not include {target} '
            f"(floor {FLOORS[target]}): includes point down")


def check_includes(root, name, text):
    floor = floor_of(name)
    if floor is None:
        return
    if floor not in FLOORS:
        yield 1, f"folder src/{floor} has no floor: give it one in tests/style/check.py"
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        wrong = match and check_include(root, name, floor, match[1])
        if wrong:
            yield number, wrong


def check_head(name, text):
    """C files start with a comment; in src and kernels it names the file, its purpose and floor."""
    head = re.match(r"/\*(.*?)\*/", text, re.S)
    if not head:
        yield 1, "the file starts with a comment that says what it is for"
        return
    floor = floor_of(name)
    if floor is None:
        return
    words = re.sub(r"\s*\n\s*\*\s*", " ", head[1])
    base = name.rsplit("/", 1)[-1]
    if not words.strip().startswith(f"{base} - "):
        yield 1, f'the head comment starts with "{base} - purpose"'
    said = re.search(r"\bFloor: (\w+)", words)
    if not said:
        yield 1, f'the head comment says "Floor: {floor}."'
    elif said[1] != floor:
        yield 1, f'the head comment says "Floor: {said[1]}" but the folder is floor {floor}'


def check_lines(text):
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield MAX_LINES + 1, f"{len(lines)} lines, at most {MAX_LINES}: a file is one concept"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
        if not line.isascii():
            yield number, "a character that is not ASCII"
        if UNFINISHED.search(line):
            yield number, "unfinished or switched-off code: finish it or file an issue"
        if MACHINE_PATH.search(line):
            yield number, "a path of one machine: paths are relative, or come from the environment"


def check_format(root, files):
    program = shutil.which("clang-format")
    if not program:
        print("style: skipped: clang-format is not installed, formatting is not checked")
        return
    run = subprocess.run([program, "--dry-run", "--Werror", "--style=file", *files], cwd=root,
                         capture_output=True, text=True, check=False)
    seen = set()
    for match in re.finditer(r"^(\S+?):(\d+):\d+: (?:error|warning): (.*)$", run.stderr, re.M):
        if match[1] not in seen:
            seen.add(match[1])
            yield match[1], int(match[2]), f"{match[3]}: run clang-format -i {match[1]}"
    if run.returncode != 0 and not seen:
        yield ".clang-format", 1, run.stderr.strip()


def check(root):
    """All violations, as (name, line number, text)."""
    found, c_files = [], []
    for path, name in sources(root):
        text = read(path)
        wrong = list(check_lines(text))
        if path.suffix in C_FILES:
            c_files.append(name)
            wrong += check_head(name, text)
            wrong += check_includes(root, name, text)
        found += [(name, number, what) for number, what in wrong]
    if c_files:
        found += check_format(root, c_files)
    return found, len(c_files)


def main():
    found, files = check(pathlib.Path(sys.argv[1]))
    for name, number, what in sorted(found):
        print(f"{name}:{number}: {what}")
    print(f"style: {files} C files, {len(found)} violations")
    return 1 if found or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

"""Property: a clean tree has no violation, and each rule of check.py fires on a tree that breaks it
and only there."""
import pathlib
import shutil
import tempfile
import unittest

import check

FORMAT = (pathlib.Path(__file__).resolve().parents[2] / ".clang-format").read_text()
HEAD = "/* {} - an example. Floor: {}. */\n"
CLEAN = {
    ".clang-format": FORMAT,
    "src/base/a.h": HEAD.format("a.h", "base") + "#pragma once\n",
    "src/dist/b.h": HEAD.format("b.h", "dist") + '#pragma once\n#include "base/a.h"\n',
    "src/config/c.c": "/* c.c - an example whose purpose is long and\n * breaks. Floor:\n"
                      " * config. */\n#include <stdio.h>\n",
    "src/observe/m.h": HEAD.format("m.h", "observe"),
    "src/train/t.c": HEAD.format("t.c", "train") + '#include "observe/m.h"\n',
    "kernels/cpu/k.c": '/* k.c - an example. Floor: kernels, internal. */\n#include "dist/b.h"\n',
    "kernels/cuda/k.cu": HEAD.format("k.cu", "kernels") + '#include "kernels/cpu/k.h"\n',
    "kernels/cpu/k.h": HEAD.format("k.h", "kernels"),
    "kernels/simt/r.cc": HEAD.format("r.cc", "kernels") + '#include "kernels/cpu/k.h"\n',
    "src/main.c": HEAD.format("main.c", "main") + '#include "train/t.h"\n',
    "src/train/t.h": HEAD.format("t.h", "train"),
    "tests/base/a.c": '/* Property: none. */\n#include "train/t.h"\n',
    "launch/run.sh": "#!/bin/sh\necho hello\n",
}


class Rules(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="trireme-style-"))
        self.addCleanup(shutil.rmtree, self.root)
        for name, text in CLEAN.items():
            self.write(name, text)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def expect(self, name, text, *parts):
        """Writing `text` there gives one violation, in that file, that says all parts."""
        self.write(name, text)
        found, _ = check.check(self.root)
        self.assertEqual([f[0] for f in found], [name], found)
        for part in parts:
            self.assertIn(part, found[0][2])

    def test_clean(self):
        found, files = check.check(self.root)
        self.assertEqual(found, [])
        self.assertEqual(files, 12)

    def test_include_up(self):
        self.expect("src/base/a.h", CLEAN["src/base/a.h"] + '#include "train/t.h"\n', "floor 4")

    def test_include_sideways(self):
        self.expect("src/dist/b.h", CLEAN["src/dist/b.h"] + '#include "config/c.h"\n', "no file")
        self.write("src/config/c.h", HEAD.format("c.h", "config"))
        self.expect("src/dist/b.h", CLEAN["src/dist/b.h"] + '#include "config/c.h"\n', "config")

    def test_include_sideways_only_one_way(self):
        self.expect("src/observe/m.h", CLEAN["src/observe/m.h"] + '#include "train/t.h"\n',
                    "observe (floor 4) may not include train")

    def test_include_tests(self):
        self.expect("kernels/cpu/k.c", CLEAN["kernels/cpu/k.c"] + '#include "tests/x.h"\n', "tests")

    def test_include_bare(self):
        self.expect("src/train/t.c", HEAD.format("t.c", "train") + '#include "t.h"\n',
                    "folder/name.h")

    def test_unknown_folder(self):
        self.expect("src/new/n.c", HEAD.format("n.c", "new"), "no floor")

    def test_head(self):
        self.expect("src/base/a.h", "#pragma once\n", "starts with a comment")

    def test_head_of_cpp(self):
        self.expect("kernels/simt/r.cc", "#pragma once\n", "starts with a comment")

    def test_head_name_of_cpp(self):
        self.expect("kernels/cuda/k.cu", HEAD.format("l.cu", "kernels"), "k.cu - purpose")

    def test_head_name(self):
        self.expect("src/base/a.h", HEAD.format("b.h", "base"), "a.h - purpose")

    def test_head_floor(self):
        self.expect("src/base/a.h", "/* a.h - an example. */\n", "Floor: base")
        self.expect("src/base/a.h", HEAD.format("a.h", "dist"), "folder is floor base")

    def test_long_file(self):
        self.expect("tests/base/a.c", CLEAN["tests/base/a.c"] + "int x;\n" * 700, "702 lines")

    def test_long_line(self):
        self.expect("launch/run.sh", "echo " + "x" * 96 + "\n", "101 columns")

    def test_any_name_in_launch(self):
        self.expect("launch/run", "echo " + "x" * 96 + "\n", "101 columns")

    def test_ascii(self):
        self.expect("launch/run.sh", "echo caf\u00e9\n", "ASCII")

    def test_unfinished(self):
        for word in ("TO" "DO", "FIX" "ME"):
            self.expect("launch/run.sh", f"# {word}: more\n", "unfinished")

    def test_switched_off(self):
        self.expect("tests/base/a.c", "/* Property. */\n#if " "0\n#endif\n", "switched-off")

    def test_machine_path(self):
        self.expect("launch/run.sh", "cd /ho" "me/someone\n", "one machine")

    @unittest.skipUnless(shutil.which("clang-format"), "clang-format is not installed")
    def test_format(self):
        self.expect("tests/base/a.c", "/* Property. */\nint  x ;\n", "clang-format -i")


if __name__ == "__main__":
    unittest.main()

"""Property: whichever allocation of the program finds no memory, the job ends as a whole, with exit
code 70 and a text that says so, soon and by no signal; checkpoints from before stay good. One
allocation fails a run (fail_alloc.c), of those spread over all that a run makes."""
import os
import shutil
from pathlib import Path

import pytest
from jobs import saved_steps, small

PROGRAM = Path(os.environ["TRIREME"])
LIBRARY = PROGRAM.parent / "tests" / "libfail_alloc.so"

if b"__asan_init" in PROGRAM.read_bytes():
    pytest.skip("AddressSanitizer brings its own malloc, so none can be made to fail",
                allow_module_level=True)


def spread(count, most):
    """`most` numbers of 1 .. count, the first and the last among them."""
    return sorted({1 + i * (count - 1) // (most - 1) for i in range(most)})


def run(lab, words, ranks, at=0):
    """A run whose allocation `at` fails, on the last rank; the process, and how many allocations
    there were if it came to its end."""
    note = lab.path / "allocations"
    note.unlink(missing_ok=True)
    prefix = ["env", f"LD_PRELOAD={LIBRARY}", f"FAIL_ALLOC_AT={at}", f"FAIL_ALLOC_COUNT={note}"]
    if ranks > 1:
        prefix.append(f"FAIL_ALLOC_RANK={ranks - 1}")
    done = lab.run(*words, ranks=ranks, code=None, prefix=prefix, timeout=60)
    return done, int(note.read_text()) if note.exists() else None


def check_all(lab, words, ranks, most, restart=lambda: None):
    restart()
    done, count = run(lab, words, ranks)
    assert done.returncode == 0, done.stderr
    assert count, "no allocation was counted"
    print(f"{' '.join(words[:2])} on {ranks}: {count} allocations")
    for at in spread(count, most):
        restart()
        done, ended = run(lab, words, ranks, at)
        what = f"allocation {at} of {count}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        if ended is not None and ended < at:  # timing decides how many requests a rank needs
            assert done.returncode == 0 and ranks > 1, what
            continue
        assert done.returncode == 70, what
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert errors and "out of memory" in errors[0], what
        assert "signal" not in done.stderr, what


@pytest.mark.parametrize("ranks, most", [(1, 25), (2, 9)])
def test_train(lab, ranks, most):
    more = dict(parallel=dict(expert=2)) if ranks > 1 else {}
    config = small(lab, "run", "moe", training=dict(steps=4, evaluate_every=2),
                   checkpoint=dict(every=2), log=dict(tensorboard=True, routing=True, trace=True),
                   **more)
    folder, before = lab.path / "checkpoints" / "run", lab.path / "before"
    lab.train(config, "training.steps=2", ranks=ranks)
    shutil.copytree(folder, before)

    def restart():
        """Every run starts from the checkpoint of step 2, with what earlier ones left of others."""
        for path in folder.glob("step-*"):
            if path.name not in os.listdir(before):
                path.unlink()

    check_all(lab, ["train", config], ranks, most, restart)
    for path in before.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    lab.run("checkpoint", "verify", folder / "step-00000002.h5")
    restart()
    lab.train(config, ranks=ranks)
    assert saved_steps(lab, "run") == [2, 4]


def test_plan(lab):
    config = small(lab, "run", "moe", model=dict(num_hidden_layers=4),
                   parallel=dict(pipeline=2, schedule="zb_v"))
    check_all(lab, ["plan", config, "--world", "2", "--schedule"], 1, 15)


def test_checkpoint(lab):
    config = small(lab, "run", training=dict(steps=2))
    lab.train(config)
    path = str(lab.checkpoint_path("run", 2))
    check_all(lab, ["checkpoint", "info", path], 1, 6)
    check_all(lab, ["checkpoint", "verify", path], 1, 6)

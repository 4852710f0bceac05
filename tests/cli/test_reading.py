"""Property: a job that only reads weights, eval or generate, holds nothing else of a training: its
memory is that of the weights in the type that computes; and its results are the training's own, at
every stage of ZeRO on any grid."""
import os
import re
import sys

import pytest

# Prints the peak of a rank's resident memory in KiB.
PEAK = (sys.executable, "-c", "import resource, subprocess, sys\n"
        "code = subprocess.call(sys.argv[1:])\n"
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
        "sys.exit(code)")
WIDE = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=8)


def trained(lab, name, dtype, model, **more):
    """One step; returns the config and its checkpoint."""
    config = lab.config(name, model=model, run=dict(dtype=dtype), checkpoint=dict(every=1),
                        training=dict(steps=1, evaluate_batches=1), **more)
    lab.train(config)
    return config, lab.checkpoint_path(name, 1)


def peak(lab, *words, ranks=1):
    """MiB of the rank that takes the most. Its peers' memory, were it mapped, would count."""
    said = lab.run(*words, ranks=ranks, prefix=PEAK, env={"TRIREME_NO_SHARED": "1"}).stderr
    return max(map(int, re.findall(r"peak (\d+)", said))) / 1024


@pytest.mark.skipif("TRIREME_CHUNK_LIMIT" in os.environ,
                    reason="MPI keeps copies of the many small messages it is forced to send")
@pytest.mark.parametrize("dtype, bytes_each", [("float32", 4), ("bfloat16", 2)])
def test_memory_is_the_weights(lab, dtype, bytes_each):
    """... and at most a tenth more, and 8 MiB for activations, beside what a tiny model takes; at
    stage 3 a rank's share of them, and a few layers."""
    (small, small_weights), (wide, wide_weights) = (trained(lab, "small", dtype, {}),
                                                    trained(lab, "wide", dtype, WIDE))
    weights = wide_weights.stat().st_size / 3 / 4 * bytes_each / 2**20
    layer = weights / WIDE["num_hidden_layers"]
    stage_3 = "--set", "parallel.zero=3"
    for ranks, want, words in [(1, weights, ()), (2, weights, ()),
                               (2, weights / 2 + 2 * layer, stage_3)]:
        taken = (peak(lab, "eval", wide, "--checkpoint", wide_weights, *words, ranks=ranks) -
                 peak(lab, "eval", small, "--checkpoint", small_weights, *words, ranks=ranks))
        print(f"eval {dtype} on {ranks} {words}: {taken:.1f} MiB for {want:.1f} MiB of weights")
        assert taken <= 1.1 * want + 8
    sample = "--prompt", "the", "--tokens", 3
    taken = (peak(lab, "generate", "--checkpoint", wide_weights, *sample) -
             peak(lab, "generate", "--checkpoint", small_weights, *sample))
    print(f"generate {dtype}: {taken:.1f} MiB")
    assert taken <= 1.1 * weights + 8


GRIDS = {"pp2": dict(pipeline=2), "tp2": dict(tensor=2), "v2": dict(pipeline=2, schedule="zb_v")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grid", GRIDS)
def test_loss_is_the_training_s(lab, grid, dtype):
    """To the last digit that is printed, from a job that holds states of all it trains."""
    model = dict(tie_word_embeddings=True)
    for zero in (1, 2, 3):
        parallel = dict(zero=zero, bucket_elems=1000, **GRIDS[grid])
        config = lab.config(f"zero {zero}", "moe", model=model, run=dict(dtype=dtype),
                            parallel=parallel, training=dict(steps=2))
        lab.train(config, ranks=4)
        said = lab.run("eval", config, "--checkpoint", lab.checkpoint_path(f"zero {zero}", 2),
                       ranks=4).stdout
        want = lab.rows(f"zero {zero}")[-1]["validation_loss"]
        assert said.startswith(f"loss {want:.6f} bits_per_byte "), said

"""Causal attention and a large product of PyTorch on this GPU, beside the rows that `trireme bench
rows` printed. Usage: torch_check.py ROWS. Needs torch with a GPU; launch/gpu-check calls it."""
import re
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ROW = re.compile(r"^attention_(forward|backward) +B (\d+) S (\d+) H (\d+) D (\d+) causal +bf16 "
                 r"+([\d.]+) ", re.M)


def microseconds(work, seconds=0.05):
    """Median of batches, after one that is not counted."""
    work()
    torch.cuda.synchronize()
    times = []
    while len(times) < 3 or sum(times) * 5 < seconds * 1e6:
        begin = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 5 * 1e6)
    return sorted(times)[len(times) // 2]


def attention(batch, length, heads, width, backend):
    """(forward, backward), each in microseconds."""
    q, k, v, dout = (torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16)
                     for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(BACKENDS[backend]):
        forward = microseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        backward = microseconds(lambda: torch.autograd.grad(out, (q, k, v), dout,
                                                            retain_graph=True))
    return {"forward": forward, "backward": backward}


def main():
    with open(sys.argv[1], encoding="ascii") as file:
        rows = ROW.findall(file.read())
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
          f"{torch.backends.cudnn.version()}")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"product of 8192, bf16: {2 * 8192**3 / microseconds(lambda: a @ b) * 1e-6:.0f} TFLOP/s")
    shares, known = {"forward": [], "backward": []}, {}
    print(f"{'attention, bf16, causal':38} {'ours':>9} {'flash':>9} {'cudnn':>9}  us")
    for way, *shape, ours in rows:
        shape = tuple(map(int, shape))
        if shape not in known:
            known[shape] = {}
            for backend in BACKENDS:
                try:
                    known[shape][backend] = attention(*shape, backend)
                except RuntimeError as reason:
                    print(f"{backend} {shape}: {str(reason).splitlines()[0]}")
        theirs = {name: time_of[way] for name, time_of in known[shape].items()}
        text = "B {} S {} H {} D {}".format(*shape)
        print(f"{way:9}{text:29} {float(ours):9.1f} "
              f"{theirs.get('flash', float('nan')):9.1f} {theirs.get('cudnn', float('nan')):9.1f}")
        if theirs:
            shares[way].append(min(theirs.values()) / float(ours))
    print("speed of the faster of PyTorch's: " + ", ".join(
        f"{way} {100 * sum(s) / len(s):.0f} %" for way, s in shares.items() if s))


if __name__ == "__main__":
    main()

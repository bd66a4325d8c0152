"""What a coarse step costs beside a fine one as the model gets deeper: by the formula, and timed.

    OMP_NUM_THREADS=1 python experiments/depth.py > experiments/results/paper-b1/depth.md
    python experiments/depth.py --batch 64 --dtype bfloat16 --compile        # on a GPU

The head is not coarsened, so the ratio only falls from 0.85 to 0.61 between 6 and 48 layers of the
paper's width. Times are medians of fine and coarse steps taken in turn, so that both see the same
machine; with one thread they are the processor's, which other work hardly changes.
"""

import argparse
import os
import statistics
import sys
import time

import torch

# Not train.py, nor what imports it: its settings for memory would change the times.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import GPT, GPTConfig  # noqa: E402
from multilevel import coarse_sets, flops_per_token, restrict  # noqa: E402

HEADER = ("| layers | FLOPs, coarse over fine | blocks only | time, coarse over fine "
          "| fine step, ms | coarse step, ms |\n| --- | --- | --- | --- | --- | --- |")


def ratios(config):
    """FLOPs of a coarse step over those of a fine one: with the head, and blocks only."""
    return [flops_per_token(config, config.n_layer // 2, head) / flops_per_token(config, head=head)
            for head in (True, False)]


def alone(device):
    """Whether the processor's time is that of a step: one thread does all of it."""
    return device == "cpu" and torch.get_num_threads() == 1


def times(config, device, dtype, batch, compiled, repeats):
    """Seconds of training steps (plain SGD) of the fine model and its first coarse model, in turn:
    two lists."""
    torch.manual_seed(1)
    model = GPT(config).to(device)
    if compiled:
        for part in (*model.blocks, model.head):
            part.compile(dynamic=False)
    nets = [model, restrict(model, coarse_sets(config.n_layer)[0])]
    optimizers = [torch.optim.SGD(net.parameters(), 1e-3, fused=device == "cuda") for net in nets]
    x = torch.randint(config.vocab_size, (batch, config.block_size), device=device)
    clock = time.process_time if alone(device) else time.perf_counter
    found = [[], []]
    for i in range(repeats + 2):  # the first two warm up
        for net, optimizer, spent in zip(nets, optimizers, found):
            begin = clock()
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = net(x, x)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for the device
            if i > 1:
                spent.append(clock() - begin)
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--batch", type=int, default=1, help="sequences of 256 tokens [1]")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = ", the processor's time" if alone(device) else ""
    print(f"The paper's width, {args.batch} x 256 tokens, {device}, {args.dtype}, "
          f"{'compiled' if args.compile else 'eager'}, {torch.get_num_threads()} thread(s), "
          f"PyTorch {torch.__version__}; medians of {args.repeats} steps (quartiles)"
          f"{clock}.\n\n{HEADER}")
    for n in args.layers:
        config = GPTConfig(n_layer=n)
        found = times(config, device, args.dtype, args.batch, args.compile, args.repeats)
        fine, coarse = ([1000 * q for q in statistics.quantiles(spent, n=4)] for spent in found)
        cells = [str(n), *(f"{r:.3f}" for r in (*ratios(config), coarse[1] / fine[1])),
                 *(f"{q[1]:.1f} ({q[0]:.1f} to {q[2]:.1f})" for q in (fine, coarse))]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""PyTorch's side of benches/engines.rs: gloo between two processes.

Arguments: seconds per figure, then sizes in bytes. Prints `what,bytes,seconds`, medians of rank 0.
"""

import os
import sys
import time

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(1)  # benches/engines.rs says what to install


def measure(rank, what, bytes, budget, call):
    times, start, go_on = [], time.perf_counter(), torch.ones(1)
    call()
    while go_on.item():
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
        if len(times) % 16 == 0:
            go_on.fill_(float(len(times) < 20000 and time.perf_counter() - start < budget))
            dist.broadcast(go_on, 0)
    if rank == 0:
        print(f"{what},{bytes},{sorted(times)[len(times) // 2]:.9f}", flush=True)


def run(rank, budget, sizes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for bytes in sizes:
        out, into = torch.zeros(bytes // 4), torch.zeros(bytes // 4)

        def exchange():
            ops = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        measure(rank, "exchange", bytes, budget, exchange)
        measure(rank, "all_reduce", bytes, budget, lambda: dist.all_reduce(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29587")
    mp.spawn(run, args=(float(sys.argv[1]), [int(size) for size in sys.argv[2:]]), nprocs=2)

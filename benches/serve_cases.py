"""What PyTorch's sides of benches share: a process that runs a case whenever it is asked to.

Its argument is the number of threads. It says which PyTorch it is on its first line. Then for every line on stdin, a
pass and a case in JSON, it answers the seconds that one run took, with the freeing of results, until stdin ends; `nan`
for a case whose library is not installed.
"""

import functools
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(1)  # the bench says what to install


def serve(make):
    """Runs the passes of cases, `forward` and `gradients` of what `make` gives; `None` is a case without its library."""
    torch.set_num_threads(int(sys.argv[1]))
    # Cases come one after another: only the tensors of the latest are kept.
    case_of = functools.lru_cache(maxsize=1)(lambda text: make(**json.loads(text)))
    print(f"PyTorch {torch.__version__}", flush=True)
    for line in sys.stdin:
        name, _, text = line.partition(" ")
        case = case_of(text)
        if case is None:
            print("nan", flush=True)
            continue
        run = {"fwd": case.forward, "fwd+bwd": case.gradients}[name]
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)

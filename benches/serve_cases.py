"""What PyTorch's sides of benches share: a process that runs a case whenever it is asked to.

Its argument is the number of threads. It says which PyTorch it is on its first line. Then for every line on stdin, a
pass and a case in JSON, it answers the seconds that one run took, with the freeing of results, until stdin ends; `nan`
for a case whose library is not installed. For a pass that ends with `:peak` it answers the MiB that the process had at
most in a run, more than before the case was made.
"""

import ctypes
import gc
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


def resident(field):
    """A line of the process's status, in MiB."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(field))
    return int(line.split()[1]) / 1024


def peak_of(run):
    """The largest resident set in the second of two runs."""
    run()
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")
    run()
    return resident("VmHWM")


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def serve(make, kept=1):
    """Runs the passes of cases, `forward` and `gradients` of what `make` gives; `None` is a case without its library. Of
    cases the latest are kept."""
    torch.set_num_threads(int(sys.argv[1]))
    cases = {}

    def case_of(text):
        if text not in cases:
            while len(cases) >= kept:
                del cases[next(iter(cases))]
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            before = resident("VmRSS")
            cases[text] = make(**json.loads(text)), before
        return cases[text]

    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for line in sys.stdin:
        name, _, text = line.partition(" ")
        case, before = case_of(text)
        if case is None:
            print("nan", flush=True)
            continue
        name, _, peak = name.partition(":")
        run = {"fwd": case.forward, "fwd+bwd": case.gradients}[name]
        print(peak_of(run) - before if peak else timed(run), flush=True)

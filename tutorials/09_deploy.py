# Deploy a tuned model
# ====================
#
# `result.export` writes one library: kernels, packed weights, and what calls them. Where it runs, it needs TVM's
# runtime, and neither eqtune nor a compiler. This script loads one in another Python process, and in a C++ program
# (09_deploy.cc, beside this file).

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tvm

import eqtune
from eqtune import zoo

folder = Path(tempfile.mkdtemp())
result = eqtune.tune_model("zoo:squeezenet", trials=64, graph="off", work_dir=folder / "work", progress=False)
threads = result.summary.context.threads
library = result.export(folder / "squeezenet.so")
(x,) = zoo.inputs("squeezenet").values()
(expected,) = result.run(x)

# Where g++ is missing, export to a name that ends in .tar: object files, which `load_module` links. For another CPU,
# `tune_model(..., target={"kind": "llvm", "mtriple": "aarch64-linux-gnu", ...})` compiles, and `export` links with
# aarch64-linux-gnu-g++, or with what you name in `compiler=`.
#
# In Python
# ---------
#
# TVM's thread pool takes half of the logical cores unless TVM_NUM_THREADS says otherwise: give it the threads that the
# model was tuned for. GLIBC_TUNABLES puts the weights into huge pages, which eqtune did while it timed the model.

SERVE = """
import sys
import numpy as np
import tvm
from tvm import relax

machine = relax.VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
output = machine["main"](tvm.runtime.tensor(np.load(sys.argv[2])))
np.save(sys.argv[3], output.numpy())
"""


def run(*command: object) -> None:
    """Run a program; what it prints is shown only if it fails, because TVM prints a line for every weight it loads."""
    environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


np.save(folder / "x.npy", x)
run(sys.executable, "-c", SERVE, library, folder / "x.npy", folder / "python.npy")
np.testing.assert_allclose(np.load(folder / "python.npy"), expected, rtol=1e-6, atol=1e-6)
print("Python: the same outputs")

# Threads and processes
# ---------------------
#
# A virtual machine is of one thread: two that call the same one crash. Each makes its own of the one library, whose
# weights they share, and each has a pool of TVM_NUM_THREADS threads: a model that was tuned with `threads=1` suits
# many. `result.run` needs no such care: calls from several threads wait for one another.
#
# TVM binds its threads to the first cores of the machine, whatever cores their process was given. Of several processes
# each needs cores of its own: TVM_BIND_THREADS=0 in the environment, and `taskset -c 2,3` before the command.

SERVE_MANY = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import tvm
from tvm import relax

library = tvm.runtime.load_module(sys.argv[1])
mine = threading.local()

def start():
    mine.main = relax.VirtualMachine(library, tvm.cpu())["main"]

def answer(x):
    return mine.main(tvm.runtime.tensor(x)).numpy()

x = np.load(sys.argv[2])
with ThreadPoolExecutor(2, initializer=start) as threads:
    *_, last = threads.map(answer, [x] * 8)
np.save(sys.argv[3], last)
"""

run(sys.executable, "-c", SERVE_MANY, library, folder / "x.npy", folder / "threads.npy")
np.testing.assert_allclose(np.load(folder / "threads.npy"), expected, rtol=1e-6, atol=1e-6)
print("Python, two threads: the same outputs")

# In C++
# ------
#
# The wheel of TVM's foreign function interface brings the headers, and `tvm-ffi-config` tells the flags; TVM's own
# wheel brings the runtime. Nothing in the program refers to that one by name, hence --no-as-needed.


def flags(what: str) -> list[str]:
    command = [sys.executable, "-m", "tvm_ffi.config", what]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


if shutil.which("g++") is None:
    print("C++: there is no g++ here")
else:
    program, runtime, interface = folder / "serve", Path(tvm.__file__).parent / "lib", flags("--libdir")[0]
    run(
        *("g++", "-O2", *flags("--cxxflags"), Path(__file__).with_suffix(".cc"), "-o", program),
        *(*flags("--ldflags"), *flags("--libs"), f"-Wl,-rpath,{interface}"),
        *(f"-L{runtime}", "-Wl,--no-as-needed", "-ltvm_runtime", f"-Wl,-rpath,{runtime}"),
    )
    x.tofile(folder / "x.bin")
    run(program, library, folder / "x.bin", folder / "cpp.bin", *x.shape)
    answer = np.fromfile(folder / "cpp.bin", np.float32).reshape(expected.shape)
    np.testing.assert_allclose(answer, expected, rtol=1e-6, atol=1e-6)
    print("C++: the same outputs")

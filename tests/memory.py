"""Peak memory of a program that runs in a process of its own (Linux)."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# `peak_since` is for the program: the high-water mark of resident memory above what it was before.
_PRELUDE = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp

def _resident(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) << 10

def start():
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    return _resident("VmRSS")

def peak_since(before):
    return _resident("VmHWM") - before

def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

jax.device_put(jnp.zeros(())).block_until_ready()
"""


def share_of_result(program: str, *args: str) -> float:
    """What the program prints last: a share `peak_since(...) / nbytes(...)`, by its own account."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(program), *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"share (\d+\.\d+)\s*$", done.stdout)
    assert found, done.stdout
    return float(found[1])

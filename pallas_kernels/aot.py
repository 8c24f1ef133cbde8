"""Compiles JAX functions for a GPU that is not here: machine code, registers, memory.

XLA and ptxas need no card, driver or toolkit, only their wheels (the extra `gpu-check`). A *child*
process is prepared for one card (Mosaic's cache of compiled kernels ignores the target, and an
instruction that a target lacks may abort the process), imports JAX and compiles there:

    results = aot.compile_all("h100", "pallas_kernels.report_cases:cases")

`compile_for` serves whole model steps as well; `Compiled.memory_analysis()` then has their memory.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pallas_kernels.aot_logs import KernelReport, read_reports
from pallas_kernels.cards import CARDS, Card

WHEELS = "gpu-check"  # folder beside the environment, and name of the extra


class WheelsMissing(RuntimeError):
    """The compiler wheels are not installed."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What became of one function.

    Attributes:
        name: of the case.
        error: why it did not compile; None where it did.
        kernels: one report for every kernel that ptxas saw.
        argument_bytes, temp_bytes: XLA's account of the device memory.
    """

    name: str
    error: str | None = None
    kernels: tuple[KernelReport, ...] = ()
    argument_bytes: int = 0
    temp_bytes: int = 0


def wheel_folders() -> list[Path]:
    """Where the compiler wheels may be: the environment itself, or the folder beside it."""
    return [Path(path) for path in sys.path if path] + [Path(sys.prefix) / WHEELS]


def find_ptxas() -> Path:
    """The ptxas of the wheel `nvidia-cuda-nvcc`.

    Raises:
        WheelsMissing: it is not installed.
    """
    for folder in wheel_folders():
        for inside in ("nvidia/cuda_nvcc/bin/ptxas", "nvidia/cu13/bin/ptxas"):
            if (folder / inside).exists() and (folder / "jax_plugins").exists():
                return folder / inside
    raise WheelsMissing(
        "no ptxas and CUDA plugin for JAX; run `make gpu-check-wheels`, or install the extra: "
        "pip install 'sparse-jax[gpu-check]'"
    )


def compile_all(card: str, cases: str, names: list[str] | None = None) -> list[CaseResult]:
    """Compiles cases for a card in a child process of its own.

    Args:
        card: a name in `CARDS`.
        cases: "module:function"; the function takes the `Card` and gives, by name, objects with
            `run`, a function, and `arguments`, a tuple of trees of ShapeDtypeStructs.
        names: which of them; None for all.

    Raises:
        ValueError: the card is unknown. WheelsMissing: no compiler is installed.
    """
    if card not in CARDS:
        raise ValueError(f"card = {card!r}; known: {', '.join(CARDS)}")
    with tempfile.TemporaryDirectory() as folder:
        environment = _child_environment(Path(folder), find_ptxas())
        command = [sys.executable, "-m", "pallas_kernels.aot", card, cases, folder]
        command.append(json.dumps(names))
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    results = [
        _from_json(json.loads(line.removeprefix("RESULT ")))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if done.returncode:
        tail = " ".join(done.stderr.split()[-60:])
        results.append(CaseResult("compiler", f"child ended with {done.returncode}: {tail}"))
    return results


def compile_for(card: Card, function, arguments) -> Any:
    """The `jax.stages.Compiled` of a function for a card; only in a child process of this module.

    Args:
        card: the target.
        function: to be jitted.
        arguments: a tuple of trees of `jax.ShapeDtypeStruct`; replicated, one device.
    """
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(card), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    with _lowered_for(card), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",)).compile()


@contextlib.contextmanager
def _lowered_for(card: Card) -> Iterator[None]:
    """Mosaic takes a card that is not there for sm_90 (jax 0.12): tell it which one it is."""
    from jax.experimental.mosaic.gpu import utils

    before = utils._infer_arch
    utils._infer_arch = lambda: card.capability
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        utils._infer_arch = before


def target_config(card: Card) -> str:
    """XLA's description of a card, as text of its protocol buffer."""
    major, minor = card.capability
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {card.shared_per_processor}
      threads_per_core_limit: {card.threads_per_processor}
      core_count: {card.processors} fpus_per_core: {card.lanes}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {card.bandwidth} l2_cache_size: {card.l2} clock_rate_ghz: {card.clock}
      device_memory_size: {card.memory} shared_memory_per_block_optin: {card.shared_per_block}
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      runtime_version: "12.9.0" driver_version: "13.0.0"
      compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0" }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
    runtime_version {{ major: 12 minor: 9 }} device_description_str: "{card.kind}" """


def _child_environment(folder: Path, ptxas: Path) -> dict[str, str]:
    """An environment in which XLA finds a ptxas that also writes down what it says."""
    root = ptxas.parent.parent
    tools = folder / "cuda" / "bin"
    tools.mkdir(parents=True)
    (folder / "cuda" / "nvvm").mkdir()
    (folder / "mosaic").mkdir()
    (folder / "cuda" / "nvvm" / "libdevice").symlink_to(root / "nvvm" / "libdevice")
    wrapper = tools / "ptxas"
    wrapper.write_text(
        f"""#!/bin/sh
case " $* " in *" --version "*|*" --input-as-string "*) exec "{ptxas}" "$@";; esac
log=$(mktemp "{folder}/ptxas.XXXXXX")
"{ptxas}" -v "$@" 2>"$log"; code=$?
mv "$log" "$log.log"; grep -v "^ptxas info" "$log.log" >&2; exit $code
"""
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    wheels = ptxas
    while not (wheels / "jax_plugins").exists():
        wheels = wheels.parent
    environment = dict(os.environ)
    flags = f"--xla_dump_to={folder}/hlo --xla_dump_hlo_as_text"
    paths = [os.getcwd(), str(wheels), environment.get("PYTHONPATH", "")]
    environment.update(
        JAX_PLATFORMS="cpu",
        CUDA_ROOT=str(folder / "cuda"),
        PATH=f"{tools}:{environment.get('PATH', '')}",
        MOSAIC_GPU_DUMP_TO=str(folder / "mosaic"),
        TF_CPP_MIN_LOG_LEVEL="3",
        XLA_FLAGS=f"{environment.get('XLA_FLAGS', '')} {flags}".strip(),
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
    )
    return environment


def _from_json(found: dict) -> CaseResult:
    kernels = tuple(KernelReport(**each) for each in found.pop("kernels"))
    return CaseResult(**found, kernels=kernels)


def _child(card: Card, cases: str, folder: Path, names: list[str] | None) -> None:
    """Compiles one case after the other and prints a line for each."""
    module, function = cases.split(":")
    known = getattr(importlib.import_module(module), function)(card)
    seen: set[str] = set()
    for name in known if names is None else names:
        try:
            memory = compile_for(card, known[name].run, known[name].arguments).memory_analysis()
            error, sizes = None, (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
        except Exception as wrong:
            error = f"{type(wrong).__name__}: {' '.join(str(wrong).split())[:300]}"
            sizes = (0, 0)
        kernels, seen = read_reports(card, folder, seen)
        result = CaseResult(name, error, tuple(kernels), *sizes)
        print("RESULT " + json.dumps(dataclasses.asdict(result)), flush=True)


if __name__ == "__main__":
    _child(CARDS[sys.argv[1]], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))

"""The arrows between packages point down only (the layout in the README). Read from the syntax
tree, so an import inside a function counts as much as one at the top of a file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("sparse_jax", "deltakv_jax", "pallas_kernels", "checkpoints")
BESIDE = {"benchmarks", "examples", "docs", "tests", "scripts"}
CLI = "sparse_jax.cli"  # the only place that may import everything

# Which of our packages each one may import, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "pallas_kernels": set(),
    "checkpoints": set(),
    "sparse_jax": {"pallas_kernels", "checkpoints"},
    "deltakv_jax": {"sparse_jax", "pallas_kernels", "checkpoints"},
}

# Libraries that one place wraps for all others, and that place.
CONFINED = {
    "flax": "sparse_jax.model",
    "orbax": "checkpoints",
    "safetensors": "checkpoints",
    "gguf": "checkpoints",
}
NOWHERE = {"torch", "tensorflow"}

# sparse_jax from the bottom to the top: a module imports only what stands on a line before its own,
# so that two on one line know nothing of each other.
LAYERS = (
    ("config_checks",),
    ("config_rope",),
    ("config_hf",),
    ("config",),
    ("rope", "prompts"),
    ("paging",),
    ("caches",),
    ("checks",),
    ("model", "sampling"),
    ("inference",),
    ("generation", "loading", "chat"),
    ("evaluate",),
    ("serving",),
    ("cli",),
)


def under(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def imported(module: str, is_package: bool, source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, whether for type checkers only) of everything a file imports;
    `from a import b` gives `a.b`, since `b` may be a module."""
    tree = ast.parse(source)
    typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in typing
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + is_package
                base = ".".join(parts[:keep] + ([base] if base else []))
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", id(node) in typing
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value), False


def part(module: str) -> str | None:
    """`caches` for `sparse_jax.caches.dense`; None for the package itself and other packages."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "sparse_jax" else None


def layer(module: str) -> int | None:
    """Index in LAYERS of a sparse_jax module; None for the package itself and unlisted modules."""
    for index, names in enumerate(LAYERS):
        if part(module) in names:
            return index
    return None


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every import of one file that the design forbids, as readable lines."""
    package = module.split(".")[0]
    found = []
    for line, target, for_types in imported(module, is_package, source):
        top = target.split(".")[0]
        where = f"{module}:{line} imports {target}"
        if top in NOWHERE:
            found.append(f"{where}: {top} is used nowhere in this project")
        if top in CONFINED and not under(module, CONFINED[top]):
            found.append(f"{where}: {top} is imported in {CONFINED[top]} only")
        if top in BESIDE:
            found.append(f"{where}: nothing imports {top}")
        if under(target, CLI) and not under(module, CLI):
            found.append(f"{where}: the command line is on top, nothing imports it")
        if under(module, CLI):
            continue
        if top in PRODUCT and top != package and top not in MAY_IMPORT[package]:
            found.append(f"{where}: the arrow points up")
        own, other = layer(module), layer(target)
        # A name for type checkers is no arrow within a package: nothing is loaded by it.
        if own is None or other is None or part(target) == part(module) or for_types:
            continue
        if other >= own:
            relation = "above" if other > own else "beside"
            found.append(f"{where}: {part(target)} is {relation} {part(module)}")
    return found


def product_files() -> list[Path]:
    return sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_arrow_points_up():
    found = []
    for path in product_files():
        found += violations(module_name(path), path.read_text(), path.name == "__init__.py")
    assert not found, "\n" + "\n".join(found)


def test_every_module_of_sparse_jax_has_a_layer():
    unlisted = {
        module_name(path)
        for path in product_files()
        if under(module_name(path), "sparse_jax")
        and module_name(path) != "sparse_jax"
        and layer(module_name(path)) is None
    }
    assert not unlisted, f"give these a place in LAYERS: {sorted(unlisted)}"


def test_all_four_packages_are_read():
    assert {module_name(path).split(".")[0] for path in product_files()} == set(PRODUCT)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("pallas_kernels.decode", "import sparse_jax", "points up"),
        ("pallas_kernels.decode", "def f():\n    from checkpoints import tree", "points up"),
        ("checkpoints.hf", "from pallas_kernels.decode import api", "points up"),
        ("sparse_jax.caches.dense", "import deltakv_jax.cache", "points up"),
        ("sparse_jax.caches.dense", "from ..generation import generate", "above caches"),
        ("sparse_jax.config", "from . import rope", "above config"),
        ("sparse_jax.config_hf", "from sparse_jax.config import ModelConfig", "above config_hf"),
        ("sparse_jax.prompts", "from sparse_jax.checks import known", "above prompts"),
        ("sparse_jax.caches.base", "from sparse_jax import checks", "above caches"),
        ("sparse_jax.caches.dense", "import sparse_jax.model", "above caches"),
        ("sparse_jax.caches.dense", "from ..inference import prefill", "above caches"),
        ("sparse_jax.model", "from sparse_jax.inference import forward", "above model"),
        ("sparse_jax.inference", "from sparse_jax.generation import generate", "above inference"),
        ("sparse_jax.loading", "from sparse_jax.generation import generate", "beside loading"),
        ("sparse_jax.generation", "from sparse_jax import loading", "beside generation"),
        (
            "pallas_kernels.decode",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sparse_jax",
            "points up",
        ),
        ("sparse_jax.model", "from sparse_jax import evaluate", "above model"),
        ("sparse_jax.generation", "from flax import linen as nn", "flax is imported in"),
        ("deltakv_jax.train", "import flax.linen", "flax is imported in"),
        ("sparse_jax.loading", "import safetensors.numpy", "safetensors is imported in"),
        ("sparse_jax.loading", "import importlib\nimportlib.import_module('gguf')", "gguf is"),
        ("checkpoints.hf", "import torch", "nowhere"),
        ("sparse_jax.cli", "import torch", "nowhere"),
        ("sparse_jax.cli", "from examples import demo", "nothing imports examples"),
        ("sparse_jax.evaluate.needle", "from sparse_jax import cli", "on top"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str, complaint: str):
    assert any(complaint in line for line in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sparse_jax.cli", "import deltakv_jax, checkpoints\nfrom sparse_jax import evaluate"),
        ("sparse_jax.model", "import flax.linen as nn\nfrom .caches import base"),
        ("sparse_jax.caches.dense", "from sparse_jax.caches.base import Span"),
        (
            "sparse_jax.config_hf",
            "import typing\nif typing.TYPE_CHECKING:\n    from .config import ModelConfig",
        ),
        ("sparse_jax.loading", "from checkpoints import hf\nfrom sparse_jax.model import forward"),
        ("deltakv_jax.cache", "from sparse_jax.caches.base import CacheMethod"),
        ("checkpoints.tree", "import orbax.checkpoint as ocp"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str):
    assert violations(module, source) == []

"""Installs the wheels of the extra `gpu-check` beside the environment, for `pallas_kernels.aot`.

    python scripts/gpu_check_wheels.py FOLDER

Not into the environment itself: there `import jax` would look for a CUDA toolkit in every program
and complain at length that it finds none. The plugins are taken in the installed JAX's version.
"""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements() -> list[str]:
    """The extra's requirements, JAX's own pinned to the version that is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = project["optional-dependencies"]["gpu-check"]
    return [f"{name}=={version('jaxlib')}" if name.startswith("jax-") else name for name in names]


def main(folder: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--upgrade", "--target", folder, *requirements()]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(str(__doc__))
    main(sys.argv[1])

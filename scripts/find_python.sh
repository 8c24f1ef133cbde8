#!/usr/bin/env bash
# Print the path of a Python >= 3.12 that can make a virtual environment, or say what to install
# and exit 1. Looked at, in this order: $PYTHON, PATH, pyenv, uv.
set -u

# A candidate is run, never judged by its name: a pyenv shim called python3.12 may have nothing
# behind it, and a distribution's python3 may lack ensurepip, without which `venv` fails half-way.
usable() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# The interpreter itself rather than a shim, so that the environment outlives a change of pyenv's
# selected version.
answer() {
  "$1" -c 'import sys; print(sys.executable)'
  exit 0
}

if [ -n "${PYTHON:-}" ]; then
  usable "$PYTHON" && answer "$PYTHON"
  echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv and ensurepip" >&2
  exit 1
fi

for name in python3.14 python3.13 python3.12 python3 python; do
  for candidate in $(type -ap "$name"); do
    usable "$candidate" && answer "$candidate"
  done
done

for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$(pyenv root 2>/dev/null)"; do
  [ -n "$root" ] || continue
  for candidate in "$root"/versions/3.1[2-9]*/bin/python3; do
    usable "$candidate" && answer "$candidate"
  done
done

if command -v uv >/dev/null 2>&1; then
  candidate="$(uv python find '>=3.12' 2>/dev/null)"
  if [ -z "$candidate" ]; then
    echo "no Python >= 3.12 here; asking uv to install one" >&2
    uv python install 3.12 >&2 && candidate="$(uv python find '>=3.12' 2>/dev/null)"
  fi
  [ -n "$candidate" ] && usable "$candidate" && answer "$candidate"
fi

cat >&2 <<'TEXT'
sparse-jax needs Python 3.12 or newer (with venv), and none was found on PATH, under pyenv or
through uv. Any one of these brings it:
    apt install python3.12 python3.12-venv      (Debian, Ubuntu; where the release has it)
    brew install python@3.12                    (macOS)
    pyenv install 3.12
    uv python install 3.12
Then run make again, or name the interpreter: make PYTHON=/path/to/python3.12 ...
TEXT
exit 1

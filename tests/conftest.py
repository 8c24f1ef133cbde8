"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from checkpoints.demo_model import download_demo_gguf


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct's GGUF file, in the user's cache directory; downloaded once."""
    return download_demo_gguf()

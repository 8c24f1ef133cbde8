"""Every kernel compiles to machine code for two cards without spills: no GPU is needed for that.

`make check-gpus` does the same for all cards.
"""

import json
import subprocess
import sys

import pytest

from pallas_kernels import aot, report
from pallas_kernels.aot_logs import resident
from pallas_kernels.cards import CARDS
from pallas_kernels.report_cases import cases


@pytest.mark.parametrize("card", ["h100", "rtx3090"])
def test_every_kernel_compiles_without_spills(card):
    """Half of the cards' instruction sets; the Hopper kernels on H100 only."""
    rows = report.rows_for(card)
    assert {row.kernel for row in rows} == set(cases(CARDS[card]))
    assert [row.fault for row in rows if row.fault] == []
    for row in rows:
        assert 0 < row.registers <= 255 and row.spill_bytes == 0
        assert 0 < row.smem_bytes <= CARDS[card].shared_per_block
        assert row.threads in (128, 256, 384) and row.blocks_per_sm >= 1


def test_the_report_of_a_program():
    command = [sys.executable, "-m", "pallas_kernels.report", "--cards", "a100", "--json"]
    command += ["--match", "token scores: SmolLM2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["gpu"] == "a100" and row["kernel"] == "token scores: SmolLM2"
    assert {"registers", "spill_bytes", "smem_bytes", "occupancy"} <= set(row)


def test_faults_are_found():
    """A kernel that spills, one that needs too much shared memory, and one that is refused."""
    good = {"registers": 128, "spill_bytes": 0, "smem_bytes": 1024, "threads": 128, "blocks": 4}

    def fault(**changes):
        kernel = aot.KernelReport("k_mosaic_gpu_kernel", **{**good, **changes}, occupancy=0.25)
        return report._judged("rtx3090", "k", kernel, None).fault

    assert fault() is None
    assert fault(spill_bytes=8) == "spills 8 bytes"
    assert "102400 bytes of shared memory; a block may have 101376" in str(fault(smem_bytes=102400))
    with pytest.raises(ValueError, match="card = 'h1000'; known: a100"):
        report.rows_for("h1000")
    with pytest.raises(ValueError, match="match = 'nothing' is in no case"):
        report.rows_for("a100", "nothing")


def test_a_hopper_kernel_is_refused_elsewhere():
    """The public op, traced for an A100: asked for, the Hopper kernel says why not."""
    (result,) = aot.compile_all("a100", "pallas_kernels.report_cases:hopper_cases",
                                ["decode hopper: SmolLM2 dense"])  # fmt: skip
    assert "needs a Hopper card" in str(result.error)


def test_missing_wheels_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(aot, "wheel_folders", lambda: [tmp_path])
    with pytest.raises(aot.WheelsMissing, match="make gpu-check-wheels"):
        aot.compile_all("a100", "pallas_kernels.report_cases:cases")


@pytest.mark.parametrize(
    "registers,shared,threads,expected",
    [(128, 0, 128, (4, 0.25)), (32, 102400, 128, (2, 0.125)), (255, 0, 512, (0, 0.0))],
)
def test_blocks_that_fit_a_multiprocessor(registers, shared, threads, expected):
    """H100: 65536 registers, 233472 bytes, 2048 threads, as NVIDIA's occupancy rules have it."""
    assert resident(CARDS["h100"], registers, shared, threads) == expected

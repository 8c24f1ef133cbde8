"""Tables of measured tiles, and measuring them, with a clock and kernels of our own."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from pallas_kernels import tune, tuned
from pallas_kernels.cards import CARDS
from pallas_kernels.decode.mosaic_portable import PortableTiles, default_tiles
from pallas_kernels.tune_jobs import Job, jobs
from pallas_kernels.tuned import Entry, tiles_for

CARD = CARDS["a100"]
SHAPE = {
    "batch": 1, "kv_heads": 8, "group": 4, "listed": 512, "size": 64, "dim": 128, "bits": 16,
}  # fmt: skip


def test_the_heuristic_answers_where_nothing_was_measured(tmp_path):
    usual = default_tiles(CARD, **SHAPE)
    assert tiles_for(CARD, "decode_portable", default_tiles, tmp_path, **SHAPE) == usual
    entry = Entry("decode_portable", {**SHAPE, "batch": 2}, {"splits": 3, "keys": 32}, 5.0)
    tuned.write_table(CARD, [entry], tmp_path)
    assert tiles_for(CARD, "decode_portable", default_tiles, tmp_path, **SHAPE) == usual
    assert tiles_for(CARDS["h100"], "decode_portable", default_tiles, tmp_path, **SHAPE) == (
        default_tiles(CARDS["h100"], **SHAPE)
    )


def test_what_was_measured_is_used(tmp_path):
    entries = [
        Entry("decode_hopper", SHAPE, {"splits": 9, "keys": 64}, 1.0),
        Entry("decode_portable", SHAPE, {"splits": 3, "keys": 32}, 5.0),
    ]
    path = tuned.write_table(CARD, entries, tmp_path, date="2026-12-01")
    assert json.loads(path.read_text())["date"] == "2026-12-01"
    got = tiles_for(CARD, "decode_portable", default_tiles, tmp_path, **SHAPE)
    assert got == PortableTiles(splits=3, keys=32)


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "a100.json: not a table"),
        ('{"card": "a100"}', "a100.json: not a table .*entries"),
        ('{"entries": [{"op": "x"}]}', "entry 0 lacks shape"),
        ('{"entries": [7]}', "entry 0 lacks op"),
        (
            '{"entries": [{"op": "x", "shape": {}, "tiles": {"keys": 1.5}, "microseconds": 1.0}]}',
            "whole numbers",
        ),
    ],
)
def test_a_damaged_table_is_named(tmp_path, text, message):
    (tmp_path / "a100.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        tiles_for(CARD, "decode_portable", default_tiles, tmp_path, **SHAPE)


def test_fields_that_the_tiles_lack_are_named(tmp_path):
    entry = Entry("decode_portable", SHAPE, {"splits": 3, "stages": 2}, 5.0)
    tuned.write_table(CARD, [entry], tmp_path)
    with pytest.raises(ValueError, match=r"stages.* must have the fields \['keys', 'splits'\]"):
        tiles_for(CARD, "decode_portable", default_tiles, tmp_path, **SHAPE)


@dataclasses.dataclass(frozen=True)
class Tiles:
    keys: int


def a_job(op: str, *keys: int) -> Job:
    def prepare(tiles):
        if tiles.keys < 0:
            raise ValueError("too large")
        return lambda x: x + tiles.keys, (jnp.zeros(2),)

    return Job(op, {"dim": 64}, [Tiles(each) for each in keys], prepare)


def by_keys(run, arguments) -> float:
    """A clock for which the time is what the function adds."""
    return float(run(*arguments)[0])


def test_the_fastest_candidate_that_runs_is_kept(caplog):
    entry = tune.best(a_job("op", 7, -1, 3, 5), by_keys)
    assert entry == Entry("op", {"dim": 64}, {"keys": 3}, 3e6)
    assert "too large" in caplog.text
    assert tune.best(a_job("op", -1), by_keys) is None


def test_other_entries_of_a_table_are_kept(tmp_path):
    kept = Entry("other", {"dim": 64}, {"keys": 1}, 2.0)
    tuned.write_table(CARD, [kept, Entry("op", {"dim": 64}, {"keys": 9}, 9.0)], tmp_path)
    path = tune.tune(CARD, [a_job("op", 4, 2)], by_keys, tmp_path)
    assert tuned.read_table(path) == (kept, Entry("op", {"dim": 64}, {"keys": 2}, 2e6))
    with pytest.raises(ValueError, match="no job"):
        tune.tune(CARD, [], by_keys, tmp_path)


def test_the_clock_times_what_it_is_given():
    assert 0 < tune.seconds(lambda x: x + 1, (jnp.zeros(3),), 3) < 1


def test_jobs_are_keyed_as_the_ops_look_them_up():
    """Every candidate can be asked for by the shape that stands in the table."""
    for card in (CARDS["h100"], CARDS["rtx4090"]):
        found = jobs(card)
        ops = {job.op for job in found}
        assert ("decode_hopper" in ops) == ("prefill" in ops) == card.is_hopper
        assert {"decode_portable", "page_scores", "token_scores"} <= ops
        assert all(job.candidates for job in found)
        assert len({tune._key(Entry(job.op, job.shape, {}, 0.0)) for job in found}) == len(found)


def test_without_a_card_the_command_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main([])
    assert ended.value.code == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err

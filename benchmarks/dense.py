"""Dense prefill and decode speed on this machine, beside Hugging Face transformers in one run.

    .venv/bin/python benchmarks/dense.py --peer PYTHON [--json FILE]

PYTHON is the interpreter of an environment with torch and transformers (Python 3.11:
`pip install torch==2.13.0 transformers gguf`). Without --peer only our side is measured. Both sides
run SmolLM2-135M-Instruct from the same GGUF file, batch 1, in turn (ours, growing cache, static
cache, ours, ...), and the ratio is taken between medians. Compile time is not counted on our side;
the peer runs eagerly, as its users run it.
"""

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.demo_model import download_demo_gguf
from sparse_jax import Dense, decode_step, empty_cache, encode_text, load_model, prefill
from sparse_jax.evaluate.report import text_table

TEXT = Path(__file__).parent.parent / "examples" / "pride_and_prejudice.txt"
STEPS = 16


class Peer:
    """The child process with torch, asked one thing at a time."""

    def __init__(self, python: str, gguf: Path):
        script = Path(__file__).with_name("dense_peer.py")
        self.process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.gguf = str(gguf)
        self.versions = self._answer()

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the peer process ended; its error stands above")
        return json.loads(line)

    def ask(self, **request) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"gguf": self.gguf, **request}) + "\n")
        self.process.stdin.flush()
        return self._answer()["seconds"]

    def close(self) -> None:
        self.process.terminate()


class Ours:
    """The same measurements through the public API; the first of a shape compiles, uncounted."""

    def __init__(self, gguf: Path, dtype: str):
        self.model = load_model(gguf, dtype=dtype)
        self.dtype = jnp.dtype(dtype)

    def prefill(self, ids: list[int], room: int) -> float:
        model = self.model
        tokens, counts = jnp.asarray([ids], jnp.int32), jnp.asarray([len(ids)], jnp.int32)
        self.cache = None
        cache = empty_cache(Dense(), model.config, 1, len(ids) + room, self.dtype)
        jax.block_until_ready(cache)
        started = time.perf_counter()
        logits, self.cache = jax.block_until_ready(
            prefill(model.params, cache, tokens, counts, config=model.config)
        )
        self.token = jnp.argmax(logits, -1).astype(jnp.int32)
        return time.perf_counter() - started

    def decode(self, steps: int) -> float:
        model, token = self.model, self.token
        started = time.perf_counter()
        for _ in range(steps):
            logits, self.cache = decode_step(model.params, self.cache, token, config=model.config)
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        jax.block_until_ready(token)
        return time.perf_counter() - started


def measure(ours: Ours, peer: Peer | None, ids: list[int], dtype: str, rounds: int) -> dict:
    """Tokens a second of every side, as the median over `rounds`, prefill and decode."""
    room = STEPS * 3
    sides: dict[str, dict[str, list[float]]] = {}

    def note(side: str, kind: str, rate: float):
        sides.setdefault(side, {}).setdefault(kind, []).append(rate)

    ours.prefill(ids, room)  # compiles
    ours.decode(STEPS)
    for _ in range(rounds):
        note("ours", "prefill", len(ids) / ours.prefill(ids, room))
        ours.decode(1)
        note("ours", "decode", STEPS / ours.decode(STEPS))
        for name, static in (("growing", False), ("static", True)) if peer else ():
            seconds = peer.ask(do="prefill", dtype=dtype, ids=ids, room=room, static=static)
            note(name, "prefill", len(ids) / seconds)
            peer.ask(do="decode", steps=1)
            note(name, "decode", STEPS / peer.ask(do="decode", steps=STEPS))
    return {
        side: {kind: statistics.median(rates) for kind, rates in kinds.items()}
        for side, kinds in sides.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="Python of an environment with torch and transformers")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 8064])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures there too")
    args = parser.parse_args()
    gguf = download_demo_gguf(progress=True)
    peer = Peer(args.peer, gguf) if args.peer else None
    results, rows = [], []
    with contextlib.ExitStack() as stack:
        if peer:
            stack.callback(peer.close)
        for dtype in args.dtypes:
            ours = Ours(gguf, dtype)
            text = encode_text(ours.model.tokenizer, TEXT.read_text())
            for context in args.contexts:
                ids = np.resize(text, context).tolist()
                sides = measure(ours, peer, ids, dtype, args.rounds)
                results.append({"dtype": dtype, "context": context, **sides})
                for kind in ("prefill", "decode"):
                    row = [dtype, str(context), kind]
                    for side in sides.values():
                        rate = side[kind]
                        row += [f"{rate:.1f}"]
                    for name in list(sides)[1:]:
                        row += [f"{sides['ours'][kind] / sides[name][kind]:.2f}x"]
                    rows.append(row)
                    print("  ".join(row), flush=True)
    versions = {"jax": jax.__version__, **(peer.versions if peer else {})}
    names = [f"{name} tok/s" for name in sides]
    ratios = [f"vs {name}" for name in list(sides)[1:]]
    print(f"\n{date.today()}, {platform.processor() or platform.machine()}, "
          f"{jax.devices()[0].device_kind}, {versions}")  # fmt: skip
    print(text_table(["dtype", "context", "what", *names, *ratios], rows))
    if args.json:
        record = {"date": str(date.today()), "versions": versions, "results": results}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

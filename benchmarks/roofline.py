"""What decode attention could reach on a card, on paper: nothing here is measured.

    .venv/bin/python benchmarks/roofline.py [--card h200]

Least time = bytes moved (pallas_kernels.traffic) over the data sheet's bandwidth. A kernel gets
there if it keeps enough bytes on their way (bandwidth times the 0.8 us or so that device memory
takes to answer) and fills the card: `in flight` is what the Hopper kernel's stages hold over what
is needed, `waves` its blocks by what the card holds at once (3.00 is even work, 1.05 is not).
"""

import argparse

import numpy as np

from pallas_kernels.cards import CARDS
from pallas_kernels.decode import hopper_tiles
from pallas_kernels.patterns import Pattern
from pallas_kernels.traffic import Stored, decode_traffic
from sparse_jax.evaluate.report import text_table

LATENCY = 0.8e-6
SIZE = 64
SHAPES = {"SmolLM2": (9, 3, 64), "Llama-8B": (32, 8, 128)}
WAYS = (("dense", Pattern(), 0), ("window 1024", Pattern(1024), 0), ("top-k 1024", Pattern(), 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    hopper = [name for name, card in CARDS.items() if card.is_hopper]
    parser.add_argument("--card", default="h200", choices=hopper)
    card = CARDS[parser.parse_args().card]
    rows = []
    for model, (heads, kv_heads, dim) in SHAPES.items():
        for batch, tokens in ((1, 8192), (1, 32768), (8, 32768), (1, 131072)):
            for way, pattern, chosen in WAYS:
                count = tokens // SIZE
                lists = np.tile(np.arange(chosen), (batch, kv_heads, 1)) if chosen else None
                listed = chosen or min(count, 17 if pattern.window else count)
                tiles = hopper_tiles.default_tiles(
                    card, batch=batch, kv_heads=kv_heads, group=heads // kv_heads,
                    listed=listed, size=SIZE, dim=dim,
                )  # fmt: skip
                traffic = decode_traffic(
                    np.full(batch, tokens), Stored(dim, SIZE), pattern,
                    heads=heads, kv_heads=kv_heads, count=count, selected=lists,
                    splits=tiles.splits, rows=8,
                )  # fmt: skip
                blocks = batch * kv_heads * tiles.splits
                held = card.processors * hopper_tiles.resident(card, 64, tiles.stages, dim)
                ahead = (tiles.stages - 1) * hopper_tiles.stage_bytes(64, dim)
                flying = min(blocks, held) * ahead / (card.bandwidth * LATENCY)
                rows.append(
                    [
                        model, str(batch), str(tokens), way, f"{traffic.moved / 1e6:.2f}",
                        f"{traffic.ratio:.3f}", f"{1e6 * traffic.moved / card.bandwidth:.1f}",
                        str(blocks), f"{blocks / held:.2f}", f"{flying:.2f}x",
                    ]
                )  # fmt: skip
    print(f"{card.kind}, {card.bandwidth / 1e12:.1f} TB/s, bfloat16, one layer; on paper")
    header = ["model", "B", "keys", "way", "MB", "moved/needed", "least us", "CTAs", "waves",
              "in flight"]  # fmt: skip
    print(text_table(header, rows))


if __name__ == "__main__":
    main()

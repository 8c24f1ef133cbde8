"""Fetch evaluation text into data/ (ignored by git) from Debian's packages.

    python scripts/fetch_text.py                 all of it
    python scripts/fetch_text.py austen          six novels (public domain), data/austen/*.txt
    python scripts/fetch_text.py postgresql      PostgreSQL's manual, data/postgresql.txt
    python scripts/fetch_text.py python          Python's documentation, data/python.txt

Needs `apt-get` and `dpkg` (Debian, Ubuntu), no root. Nothing is installed: the packages are
downloaded and unpacked into a temporary folder. A text that is there already is left alone.
"""

import argparse
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

log = logging.getLogger("fetch_text")


def unpack(package: str, folder: Path) -> Path:
    """Download a Debian package and unpack it; gives the folder that holds its files."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not here: this script needs Debian or Ubuntu")
    done = subprocess.run(
        ["apt-get", "download", "-qq", package], cwd=folder, capture_output=True, text=True
    )
    files = list(folder.glob(f"{package}_*.deb"))
    if done.returncode or not files:
        raise SystemExit(
            f"apt-get download {package} failed (is `apt-get update` due?):\n{done.stderr}"
        )
    target = folder / package
    subprocess.run(["dpkg", "-x", str(files[0]), str(target)], check=True)
    return target


# --- the novels: an R lazy-load database, one compressed character vector for each book ---

R_STRINGS, R_STRING = 16, 9  # type codes of R's serialisation: a character vector, one string


def read_r_strings(data: bytes) -> list[str]:
    """The lines of an R character vector, from R's XDR serialisation, version 3."""
    if data[:2] != b"X\n" or int.from_bytes(data[2:6]) != 3:
        raise ValueError(f"not R's XDR serialisation, version 3: starts with {data[:6]!r}")
    at = 14  # past format, version and the two R versions
    at += 4 + int.from_bytes(data[at : at + 4])  # the name of the native encoding
    if data[at + 3] != R_STRINGS:
        raise ValueError(
            f"an R object of type {data[at + 3]} where a character vector was expected"
        )
    count = int.from_bytes(data[at + 4 : at + 8])
    at += 8
    lines = []
    for _ in range(count):
        length = int.from_bytes(data[at + 4 : at + 8], signed=True)
        if data[at + 3] != R_STRING or length < 0:
            raise ValueError(f"no string at byte {at} of an R character vector")
        lines.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return lines


def read_rdb(data: bytes) -> Iterator[list[str]]:
    """The character vectors of an .rdb file: (length before compression, zlib stream) repeated,
    so that the index beside it is not needed."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        stream = zlib.decompressobj()
        plain = stream.decompress(data[at + 4 :])
        if not stream.eof or len(plain) != size:
            raise ValueError(f"the object at byte {at} has {len(plain)} bytes, {size} promised")
        yield read_r_strings(plain)
        at = len(data) - len(stream.unused_data)


def fetch_austen(out: Path) -> None:
    folder = out / "austen"
    with tempfile.TemporaryDirectory() as temp:
        files = unpack("r-cran-janeaustenr", Path(temp))
        books = read_rdb(next(files.rglob("data/Rdata.rdb")).read_bytes())
        folder.mkdir(parents=True, exist_ok=True)
        for lines in books:
            name = re.sub(r"\W+", "_", lines[0].strip().lower())
            write(folder / f"{name}.txt", "\n".join(lines) + "\n")


# --- manuals: HTML to plain text ---

BLOCKS = set(
    "article blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table tr ul".split()
)
SKIPPED = {"script", "style", "head", "nav"}
VOID = set("area base br col embed hr img input link meta source track wbr".split())
NAVIGATION = set(
    "navheader navfooter related sphinxsidebar footer headerlink toc toctree-wrapper".split()
)


class TextOfPage(HTMLParser):
    """Text of a page: one line a paragraph, `pre` kept as it is, navigation left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []  # (tag, is it left out) of each open element
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.parts.append("\n")
        if tag in VOID:
            return
        classes = set((dict(attrs).get("class") or "").split())
        self.open.append((tag, tag in SKIPPED or bool(classes & NAVIGATION)))
        self.pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCKS:
            self.parts.append("\n")
        if tag in ("td", "th"):
            self.parts.append(" ")
        if not any(name == tag for name, _ in self.open):
            return
        while self.open:  # an element whose end tag was left out ends with its parent
            name, _ = self.open.pop()
            self.pre -= name == "pre"
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        if any(left_out for _, left_out in self.open):
            return
        if not self.pre:
            data = re.sub(r"\s+", " ", data)
            if self.parts and self.parts[-1].endswith(("\n", " ")):
                data = data.lstrip()
        self.parts.append(data)

    def text(self) -> str:
        lines = (line.rstrip() for line in "".join(self.parts).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def text_of_page(html: str) -> str:
    page = TextOfPage()
    page.feed(html)
    page.close()
    return page.text()


# Package and first page. The order of each book follows from there.
POSTGRESQL = ("postgresql-doc-15", "preface.html")
PYTHON = ("python3.11-doc", "tutorial/index.html")

NEXT_PAGE = re.compile(r"""<link rel="next"[^>]*\bhref="([^"#]+)""")


def reading_order(first: Path) -> Iterator[str]:
    """The HTML of a manual's pages in the order of the book: each page names the next one."""
    page, seen = first, set()
    while page.is_file() and page not in seen:
        seen.add(page)
        html = page.read_text(encoding="utf-8", errors="replace")
        yield html
        link = NEXT_PAGE.search(html)
        if link is None:
            return
        page = (page.parent / link[1]).resolve()


def fetch_manual(target: Path, package: str, first: str) -> None:
    with tempfile.TemporaryDirectory() as temp:
        files = unpack(package, Path(temp))
        start = next(files.rglob(f"html/{first}"), None)
        if start is None:
            raise SystemExit(f"{package} holds no page {first}")
        pages = [text_of_page(html) for html in reading_order(start.resolve())]
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target, "\n".join(pages))


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    log.info("%s: %s characters", path, f"{len(text):,}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpora", nargs="*", metavar="austen|postgresql|python")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "data")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out: Path = args.out
    postgresql, python = out / "postgresql.txt", out / "python.txt"
    fetchers: dict[str, tuple[Path, Callable[[], None]]] = {
        "austen": (out / "austen", lambda: fetch_austen(out)),
        "postgresql": (postgresql, lambda: fetch_manual(postgresql, *POSTGRESQL)),
        "python": (python, lambda: fetch_manual(python, *PYTHON)),
    }
    unknown = sorted(set(args.corpora) - set(fetchers))
    if unknown:
        parser.error(f"unknown corpus {', '.join(unknown)}; there are {', '.join(fetchers)}")
    for name in args.corpora or fetchers:
        target, fetch = fetchers[name]
        if target.exists():
            log.info("%s is there already", target)
        else:
            fetch()
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Make text files to measure quality on, of kinds that calibration has not seen, and print their paths.

    fiction.txt     Alice's Adventures in Wonderland (Lewis Carroll, 1865), 25,000 words
    technical.txt   proceedings of the Workshop on Electronic Texts (Library of Congress, 1992), 55,000 words

Both are public domain and part of the Canterbury corpus, which the sources of the package `brotli` test with. Lines
are joined to paragraphs; headings, tables and other paragraphs below 12 words are left out, and so is Project
Gutenberg's preamble. Calibration reads Python's help topics. Existing files are kept.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tempfile
from pathlib import Path

from packages import FetchError, cache_folder, download

PACKAGE, VERSION = "brotli", "1.1.0"
FOLDER = "Brotli-1.1.0/tests/testdata"
LEAST_WORDS = 12
TEXTS = {
    "fiction.txt": ("alice29.txt", "Alice was beginning"),
    "technical.txt": ("lcet10.txt", "The Workshop on Electronic Texts (1)"),
}
"""Output file -> the package's file, and the words with which the text begins in it."""


def paragraphs(text: str, beginning: str) -> str:
    """The text from `beginning` on, one line per paragraph, with empty lines between. Raises FetchError."""
    at = text.find(beginning)
    if at < 0:
        raise FetchError(f"{PACKAGE} {VERSION} has another text: no {beginning!r} in it")
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text[at:]))
    return "\n\n".join(block for block in blocks if len(block.split()) >= LEAST_WORDS) + "\n"


def make(folder: Path) -> None:
    """Write the files of TEXTS. Raises FetchError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            with tarfile.open(download(PACKAGE, VERSION, Path(temporary), "*.tar.gz")) as archive:
                for source, _ in TEXTS.values():
                    archive.extract(f"{FOLDER}/{source}", temporary, filter="data")
            for target, (source, beginning) in TEXTS.items():
                text = Path(temporary, FOLDER, source).read_text(encoding="latin-1")
                (folder / target).write_text(paragraphs(text, beginning), encoding="utf-8")
    except KeyError as error:
        raise FetchError(f"{PACKAGE} {VERSION} has another text: {error.args[0]}") from error
    except (OSError, tarfile.TarError) as error:
        raise FetchError(f"{folder} cannot be made: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write into (default: in the user's cache)")
    options = parser.parse_args()
    try:
        folder = options.out or cache_folder() / "texts"
        if not all((folder / name).exists() for name in TEXTS):
            make(folder)
    except FetchError as error:
        sys.exit(f"fetch_texts: {error}")
    for name in TEXTS:
        print(folder / name)


if __name__ == "__main__":
    main()

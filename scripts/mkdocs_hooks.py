"""Makes the repository's relative links work in the docs site.

A page of docs/ links to a file outside as on any host of repositories: `../benchmarks/results/routes.csv`. The site
has a copy of each such file in `repository/`, and the link leads there. Pages in Markdown become pages, whose own links
are followed alike; a link to a folder leads to its README.md, or else to a list of its files. MkDocs then checks all
links.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPO = Path(__file__).parents[1]
DOCS, COPIES = "docs", "repository"
INDEX = "index.md"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
"""The path of a relative link or image; web addresses have a colon."""
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files outside docs/ that are linked, and the files that they link to."""
    from mkdocs.structure.files import File

    waiting = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in targets(page, content(page)):
            if target in seen or target.startswith(f"{DOCS}/"):
                continue
            seen.add(target)
            if target.endswith(".md"):
                waiting.append(target)
                files.append(File.generated(config, in_site(target), content=content(target)))
            else:
                files.append(File.generated(config, in_site(target), abs_src_path=str(REPO / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where their targets are in the site."""
    here = in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = resolve(here, match[1])
        return match[1] if target is None else posixpath.relpath(in_site(target), folder or ".")

    fences = list(FENCE.finditer(markdown))
    parts, at = [], 0
    for fence in fences:
        parts += [LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[at:])])


def targets(page: str, markdown: str) -> Iterator[str]:
    """The files in the repository that a page of it links to."""
    for match in LINK.finditer(FENCE.sub("", markdown)):
        target = resolve(page, match[1])
        if target is not None:
            yield target


def resolve(page: str, link: str) -> str | None:
    """The file that a page links to, both by their paths in the repository. A folder stands for its README.md, or for a
    list of files. None if there is no such file: MkDocs will say so."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    path = REPO / target
    if path.is_dir():
        return f"{target}/README.md" if (path / "README.md").exists() else f"{target}/{INDEX}"
    return target if path.is_file() else None


def content(page: str) -> str:
    """The content of a Markdown page of the repository, or of a folder's list of files."""
    path = REPO / page
    if path.exists() or path.name != INDEX:
        return path.read_text(encoding="utf-8")
    lines = [f"- [{file.name}]({file.name})" for file in sorted(path.parent.iterdir()) if file.is_file()]
    return "\n".join([f"# {path.parent.relative_to(REPO)}", "", *lines, ""])


def in_site(target: str) -> str:
    """Path in the site's sources of a file in the repository."""
    return target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else f"{COPIES}/{target}"


def in_repository(source: str) -> str:
    """Inverse of `in_site`."""
    return source.removeprefix(f"{COPIES}/") if source.startswith(f"{COPIES}/") else f"{DOCS}/{source}"

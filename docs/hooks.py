"""The site's pages and pictures that stand outside docs/, and links that leave it; MkDocs calls these (mkdocs.yml).

Every link in the repository is relative to its file, as a plain viewer of the repository wants it. A link to a page of the
site is rewritten here; one to any other file, such as a test or a config, keeps its words only: the site has no such file,
and the repository no address that could stand here.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ADOPTED = {
    "README.md": "index.md",
    "recipe/partial_rollout/README.md": "keys.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/studies/results/peers.png": "peers.png",
    "tests/studies/results/runs.png": "runs.png",
}
"""Page or picture of the site by the file that it is made of, both as paths from their roots."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]+)?\)")
"""a link or an image (``!``) to a file: words, target, anchor"""


def on_files(files: Files, config: Any) -> Files:
    """Add the adopted pages and pictures."""
    root = Path(config.config_file_path).parent
    for source, page in ADOPTED.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with its links as the site has them."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, page: str) -> str:
    """``markdown`` of the site's ``page``, whose links are relative to the file that the page is made of.

    >>> site_links("[keys](../recipe/partial_rollout/README.md#keys), [a test](../tests/e2e/scripted_tool.py)", "tuning.md")
    '[keys](keys.md#keys), a test'
    """
    sources = {adopted: source for source, adopted in ADOPTED.items()}
    folder = os.path.dirname(sources.get(page, f"docs/{page}"))

    def link(match: re.Match[str]) -> str:
        image, words, target, anchor = match.groups(default="")
        file = os.path.normpath(os.path.join(folder, target))
        if file not in ADOPTED and not file.startswith("docs/"):
            return words
        there = ADOPTED.get(file) or file.removeprefix("docs/")
        return f"{image}[{words}]({os.path.relpath(there, os.path.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, markdown)

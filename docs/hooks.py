"""The documentation site: what lies outside docs/ gets pages of its own, so that links work on GitHub and here."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/decisions": "decisions/index.md",
}
"""Pages of the site, by what they are made of."""

SOURCES = {path: source for source, path in PAGES.items()}
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[#)])")
BADGE = re.compile(r"^\[!\[.*\]\(\.\./\.\./actions/.*\n\n", re.MULTILINE)
"""It is a page of the repository's host, which the site does not know."""
PREFORMATTED = re.compile(r"(?<=<pre>).*?(?=</pre>)", re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/, and what pages link to there."""
    for source, path in PAGES.items():
        files.append(File.generated(config, path, content=_text(source)))
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= {_resolved(link, file.src_uri) for link in LINK.findall(file.content_string)}
    for source in sorted(linked):
        if not source.startswith("docs/") and source not in PAGES and (ROOT / source).is_file():
            code = f"# {source}\n\n````{LANGUAGES.get(Path(source).suffix, '')}\n{(ROOT / source).read_text()}````\n"
            text = _notebook(source) if source.endswith(".ipynb") else code
            path = f"{source}.md"
            files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    config.nav = [_with_folders(item, files) for item in config.nav]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to pages of the site, and let what is folded be Markdown."""
    here = page.file.src_uri
    if here.endswith((".py.md", ".yaml.md", ".sh.md", ".ipynb.md")):
        return markdown
    linked = LINK.sub(
        lambda link: posixpath.relpath(_page(_resolved(link[1], here)), posixpath.dirname(here)), markdown
    )
    return linked.replace("<details>", "<details markdown>")


def _notebook(source: str) -> str:
    """Return a notebook as a page: its text, its code, and what that returned."""
    parts = []
    for cell in json.loads((ROOT / source).read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # Its links are relative to the notebook.
            parts.append(
                LINK.sub(lambda link: posixpath.relpath(_page(_from(source, link[1])), posixpath.dirname(source)), text)
            )
        else:
            parts += [f"```python\n{text}\n```", *map(_output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Return what a cell returned, in the richest form: a picture, HTML, or text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        html = PREFORMATTED.sub(lambda found: found[0].rstrip("\n").replace("\n", "&#10;"), "".join(data["text/html"]))
        lines = html.splitlines()  # in one line, so that Markdown leaves it alone
        return f'<div class="output">{"".join(line.strip() for line in lines)}</div>'
    return f"```\n{''.join(data['text/plain'])}\n```"


def _from(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _with_folders(item: Any, files: Any) -> Any:
    """Replace each folder in the navigation by its pages: the index, then those that it links to, in that order."""
    if isinstance(item, str):
        return item
    (title, value), *_ = item.items()
    if isinstance(value, list):
        return {title: [_with_folders(each, files) for each in value]}
    if not value.endswith("/"):
        return item
    index = files.get_file_from_path(f"{value}index.md")
    names = dict.fromkeys(["index.md", *LINK.findall(index.content_string)])
    return {title: [value + name for name in names if "/" not in name]}


def _resolved(link: str, page: str) -> str:
    """Return what a link on a page of the site means, from the root of the repository."""
    source = SOURCES.get(page, f"docs/{page}")
    return posixpath.normpath(
        posixpath.join(posixpath.dirname(source) if page != "decisions/index.md" else source, link)
    )


def _page(source: str) -> str:
    """Return the page of the site about a file of the repository."""
    if source in PAGES:
        return PAGES[source]
    return source.removeprefix("docs/") if source.startswith("docs/") else f"{source}.md"


def _text(source: str) -> str:
    """Return what a page is made of: a file, or the titles of those in a folder."""
    if source != "docs/decisions":
        return BADGE.sub("", (ROOT / source).read_text())
    titles = ((path, path.read_text().split("\n", 1)[0]) for path in sorted((ROOT / source).glob("*.md")))
    return "# Decisions\n\n" + "\n".join(f"- [{title.removeprefix('# ')}]({path.name})" for path, title in titles)

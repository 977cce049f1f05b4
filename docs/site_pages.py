"""A Sphinx extension: the navigation, links to the repository and links to the reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PICTURE = r'(?s)<picture>.*srcset="([^"]+)".*<img src="([^"]+)" alt="([^"]+)">.*</picture>'
VARIABLES = {  # in examples -> their class
    "checkpointer": "Checkpointer",
    "manager": "CheckpointManager",
    "pending": "PendingSave",
}
SUBPAGES = {  # page -> the pages below it in the navigation
    "guide/trainers": ["hugging-face-trainer", "accelerate", "lightning"],
    "guide/recipes/index": ["*"],
    "decisions/index": ["*"],
}


# ---- notebooks


def read_notebook(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn a notebook into Markdown, with the outputs that it stores."""
    if Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    blocks = []
    for cell in json.loads(source[0])["cells"]:
        text = "".join(cell["source"])
        blocks.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = ["".join(output["text"]) for output in cell.get("outputs", [])]
        blocks += [f"```text\n{text}```" for text in printed]
    source[0] = "\n\n".join(blocks) + "\n"


# ---- the navigation


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the tables of contents, which a page in the repository does not show."""
    if docname == "index":
        sections = re.split(r"^## (.+)$", source[0], flags=re.MULTILINE)[1:]
        for caption, body in zip(sections[::2], sections[1::2], strict=True):
            links = re.findall(r"^\| \[[^]]+\]\(([\w/.-]+)\)", body, re.MULTILINE)
            if pages := [name for name in map(page_name, links) if name in app.env.found_docs]:
                source[0] += contents(pages, ":hidden:", f":caption: {caption}")
    elif docname in SUBPAGES:
        is_listed = docname != "decisions/index"
        source[0] += contents(SUBPAGES[docname], ":hidden:" if is_listed else ":maxdepth: 1")


def page_name(path: str) -> str:
    """Return the name of a page of this folder; a folder stands for its index."""
    is_folder = (DOCS / path).is_dir()
    return f"{path}/index" if is_folder else path.removesuffix(".md").removesuffix(".ipynb")


def contents(pages: list[str], *options: str) -> str:
    """Return a table of contents."""
    return "\n".join(["\n```{toctree}", ":glob:", *options, "", *pages, "```\n"])


# ---- links to the repository


class RepositoryLinks(SphinxTransform):
    """Points links at the repository if their target is not a page."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        folder = DOCS.joinpath(self.env.docname).parent
        for node in list(self.document.findall(nodes.Element)):
            match node:
                case addnodes.download_reference():
                    self.replace(node, folder / node["reftarget"])
                case addnodes.pending_xref(attributes={"reftype": "myst", "refdomain": None}):
                    self.replace(node, folder / node["reftarget"])
                case addnodes.pending_xref(attributes={"refdomain": "doc"}):
                    if node["reftarget"] not in self.env.found_docs:
                        page = Path(self.env.doc2path(node["reftarget"]))
                        self.replace(node, page, node["reftargetid"])

    def replace(self, node: nodes.Element, path: Path, anchor: str | None = None) -> None:
        """Link to a file or folder. Of one that does not exist, Sphinx warns."""
        path = path.resolve()
        index = self.env.path2doc(str(path / "index.md"))
        if index in self.env.found_docs:
            node.attributes |= {"refdomain": "doc", "reftarget": index, "reftargetid": None}
        elif path.exists():
            kind = "tree" if path.is_dir() else "blob"
            version = f"{self.config.repository}/{kind}/v{self.config.release}"
            address = f"{version}/{path.relative_to(ROOT).as_posix()}"
            address += f"#{anchor}" if anchor else ""
            node.replace_self(nodes.reference("", "", *node.children, refuri=address))


# ---- pictures


class Pictures(SphinxTransform):
    """Turns a `<picture>` into two images, one for each of the theme's color schemes."""

    default_priority = 5  # before images are collected

    def apply(self, **_: Any) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            picture = re.search(PICTURE, raw.astext())
            if picture:
                dark, light, text = picture.groups()
                raw.replace_self(
                    [
                        nodes.image(uri=light, alt=text, classes=["only-light"]),
                        nodes.image(uri=dark, alt=text, classes=["only-dark"]),
                    ]
                )


# ---- links to the reference


class ReferenceAnchors(SphinxTransform):
    """Gives each name of the reference an id, such as `uc.SaveOptions.fsync`, and records it."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        if self.env.docname == "cli":
            titles = (section[0].astext() for section in self.document.findall(nodes.section))
            self.env.command_verbs = {title for title in titles if title.isalpha()}
        if self.env.docname != "reference":
            return
        self.env.reference_names = {}  # each name that a page may use -> ids
        module = owner = ""
        for node in self.document.findall():
            if isinstance(node, nodes.section):
                title, depth = node[0].astext(), len(list(ancestors(node)))
                if depth == 2:
                    module = f"{title}." if title.startswith("unified_ckpt.") else ""
                elif depth > 2:
                    owner = module + title
                    self.name(node, owner)
            elif isinstance(node, nodes.list_item):
                for names in re.findall(r"(?:^|\. )((?:`\w+`(?:, )?)+):", node[0].rawsource):
                    for name in re.findall(r"\w+", names):
                        self.name(node, f"{owner}.{name}")

    def name(self, node: nodes.Element, anchor: str) -> None:
        node["ids"].append(anchor)
        words = anchor.split(".")
        for first in range(len(words)):
            self.env.reference_names.setdefault(".".join(words[first:]), []).append(anchor)


class ReferenceLinks(SphinxPostTransform):
    """Links the first mention of a name or command in each section to where it is explained."""

    default_priority = 500

    def run(self, **_: Any) -> None:
        docname = self.env.current_document.docname
        if docname == "reference":
            return
        page = Path(self.env.doc2path(docname)).read_text()
        linked = set()
        for literal in list(self.document.findall(nodes.literal)):
            parents = list(ancestors(literal))
            if any(isinstance(parent, nodes.title | nodes.reference) for parent in parents):
                continue
            section = next(parent for parent in parents if isinstance(parent, nodes.section))
            target = self.explained(literal.astext(), page)
            if target and target[0] != docname and (section, target) not in linked:
                linked.add((section, target))
                address = f"{self.app.builder.get_relative_uri(docname, target[0])}#{target[1]}"
                link = nodes.reference("", "", literal.deepcopy(), refuri=address, internal=True)
                literal.replace_self(link)

    def explained(self, text: str, page: str) -> tuple[str, str] | None:
        """Return the page and id that explain a text in code font."""
        command = re.match(r"unified-ckpt (\w+)", text)
        if command and command[1] in self.env.command_verbs:
            return "cli", command[1]
        anchor = reference_anchor(text, page, self.env.reference_names)
        return ("reference", anchor) if anchor else None


def reference_anchor(text: str, page: str, names: dict[str, list[str]]) -> str | None:
    """Return the id that explains `uc.save`, `SaveOptions(fsync=False)` or `fsync=False`.

    A name of several classes is that of the one which the page names most often.
    """
    match = re.fullmatch(r"([\w.]*)(\(.*\))?(=[^=]*)?", text)
    name, arguments, value = match.groups() if match else ("", None, None)
    variable, dot, member = name.partition(".")
    name = f"{VARIABLES.get(variable, variable)}{dot}{member}"
    option = re.fullmatch(r"\((\w+)=[^=]*\)", arguments or "")
    if option and f"{name}.{option[1]}" in names:
        name = f"{name}.{option[1]}"
    known = names.get(name, [])
    mentions = {anchor: page.count(owner_of(anchor)) for anchor in known}
    if "." not in name and not name[:1].isupper():
        options = [anchor for anchor in known if owner_of(anchor).endswith("Options")]
        if "_" in name:
            known = options or [anchor for anchor in known if len(known) == 1 and mentions[anchor]]
        elif value is None or options != known:  # may be any word, or also an argument
            return None
    best = max(known, key=mentions.__getitem__, default=None)
    return best if len(known) == 1 or mentions.get(best) else None


def owner_of(anchor: str) -> str:
    """Return the class that has a name, as pages write it; `uc` for other names."""
    return anchor.rpartition(".")[0].removeprefix("uc.")


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository", "", "env")
    app.connect("source-read", read_notebook)
    app.connect("source-read", add_navigation)
    app.add_transform(RepositoryLinks)
    app.add_transform(Pictures)
    app.add_transform(ReferenceAnchors)
    app.add_post_transform(ReferenceLinks)
    return {"parallel_read_safe": False, "parallel_write_safe": True}

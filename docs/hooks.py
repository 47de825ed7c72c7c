"""Generated parts of the documentation site: facts that the code states are not written twice.

MkDocs calls the functions `on_...`. They add

    index.md, contributing.md      README.md and CONTRIBUTING.md
    methods/NAME.md                a page per method: its docstring, settings and phases

and replace each line `<!-- generated: NAME -->` of a page by the text of `GENERATED[NAME]`.
A new method, option or setting appears without an edit here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import getdoc, getmodule
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

import fedloom
import fedloom.api
from fedloom.cli import app
from fedloom.core.disclosure import server_learns
from fedloom.core.filters import parse_filters
from fedloom.core.method import Method
from fedloom.core.phase import Phase, phases_of
from fedloom.core.registry import make_method, method_class, method_names
from fedloom.core.settings import default_of, valid_values
from fedloom.errors import ConfigError
from fedloom.experiments.recipe import TABLES
from fedloom.privacy import measured

ROOT = Path(__file__).resolve().parents[1]
COPIES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
# What a member of a documented class is for: only methods' authors, not engines.
FOR_ENGINES = "perform|keep|note_scored|snapshot|restore|address|ask_phase|reply_schema|weights"


# ---- MkDocs ----
def on_config(config: Any) -> Any:
    """Lists the methods' pages under the entry `Methods` of the navigation."""
    pages = [{name: f"methods/{module}.md"} for name, module in sorted(method_names().items())]
    for group in config["nav"]:
        for entry in next(iter(group.values())) if isinstance(group, dict) else ():
            if isinstance(entry, dict) and entry.get("Methods") == "methods.md":
                entry["Methods"] = ["methods.md", *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    pages = {page: _on_the_site((ROOT / source).read_text()) for page, source in COPIES.items()}
    pages |= {f"methods/{module}.md": method_page(n) for n, module in method_names().items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the generated parts of a page. Drops remarks for the tests from code blocks."""
    markdown = re.sub(r"^```python no-run: .+$", "```python", markdown, flags=re.M)
    return re.sub(r"<!-- generated: (\S+) -->", lambda found: GENERATED[found[1]](), markdown)


def _on_the_site(text: str) -> str:
    """Changes links of a file in the root folder into links within docs/."""
    names = {source: page for page, source in COPIES.items()}
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((README|CONTRIBUTING)\.md", lambda m: f"]({names[m[1] + '.md']}", text)


# ---- methods ----
def method_page(name: str) -> str:
    """Returns a method's page."""
    cls = method_class(name)
    first, _, rest = (getdoc(getmodule(cls)) or "").partition("\n")
    title, _, idea = first.partition(": ")
    phases = phases_of(cls)
    lines = [f"# {title}", "", _escaped(idea[:1].upper() + idea[1:]), ""]
    lines += [f"    fedloom run --method {name}", "", *_docstring(rest), ""]
    lines += ["## Properties", "", *_table(("property", "value"), _properties(name, cls)), ""]
    lines += ["## Settings", "", *settings_table(cls), ""]
    lines += ["## Phases", "", *_table(("phase", "takes", "answers", "what it does"), [
        (f"`{key}`", _code(phase.parameters), _answers(phase), _summary(phase))
        for key, phase in phases.items()
    ])]  # fmt: skip
    return "\n".join(lines) + "\n"


def _properties(name: str, cls: type[Method]) -> Iterator[tuple[str, str]]:
    yield "source", f"`src/{cls.__module__.replace('.', '/')}.py`"
    yield "tasks", " and ".join(cls.tasks)
    yield "evaluation", ", ".join(cls.evaluations)
    yield "models", "the same for all clients" if cls.one_model else "may differ between clients"
    single = _code(single_replies(name))
    yield "secure sums", f"no: the server needs each client's own {single}" if single else "yes"
    yield "upload filters", _filters(cls)
    yield "the server learns", server_learns(cls)
    if cls.discloses_to_peers:
        yield "other clients learn", cls.discloses_to_peers
    yield "measured", "<br>".join(measured.statement(name))
    if cls.uses_cross_edges:
        yield "cross edges", "needed: both owners of a cut edge know it"
    if cls.transductive:
        yield "inductive federations", "refused: it sees all nodes before training"
    if not cls.predicts_unseen:
        yield "unseen items", f"cannot be predicted: that needs {cls.unseen_needs}"
    if cls.validates:
        yield "validation labels", "choose between models"
    if cls.min_replies > 1:
        yield "fewest replies", f"{cls.min_replies}"
    if cls.requires_all:
        yield "all clients must answer", _code(cls.requires_all)


def _filters(cls: type[Method]) -> str:
    """Returns the filters that the method's uploads can have."""
    for names in (("float16", "int8", "topk"), ("float16", "int8")):
        try:
            for name in names:
                chain = parse_filters(f"{name}=1" if name == "topk" else name, "run.upload")
                chain.check(cls, "run.upload")
            return _code(names)
        except ConfigError:
            continue
    return "none: its clients send no weights"


def _answers(phase: Phase) -> str:
    declared = {
        key: f"`{value}`" if isinstance(value, str) else "computed"
        for key, value in phase.reply.items()
    }
    told = ", ".join(f"`{key}`: {value}" for key, value in declared.items()) or "nothing"
    if phase.read_by:
        return f"peer messages, read by `{phase.read_by}`: {told}"
    by = f" by `{phase.weighted_by}`" if phase.weighted_by else ""
    return f"{told} ({phase.aggregate}{by})" if phase.aggregate else told


def _summary(phase: Phase) -> str:
    return _escaped((getdoc(phase.function) or "").partition("\n\n")[0].replace("\n", " "))


def methods_table() -> str:
    """Returns all methods, a line each."""
    rows = []
    for name, module in sorted(method_names().items()):
        title, _, idea = (
            (getdoc(getmodule(method_class(name))) or "").partition("\n")[0].partition(": ")
        )
        secure = "" if single_replies(name) else "yes"
        rows.append((f"[{title}](methods/{module}.md)", f"`{name}`", _escaped(idea), secure))
    return "\n".join(_table(("method", "name", "idea", "secure sums"), rows))


def disclosure_table() -> str:
    """Returns what attacks read in every method's messages, a line each."""
    head = (
        "method",
        "pairs of client and feature read",
        "membership, AUC",
        "training labels",
        "class means, or rows to peers, of one item",
        "membership from secure sums, AUC",
    )
    rows = [(f"`{name}`", *measured.cells(name)) for name in sorted(method_names())]
    return "\n".join(_table(head, rows))


# ---- secure sums ----
def single_replies(name: str) -> tuple[str, ...]:
    """Returns the phases for which a method, with its default settings, refuses secure sums."""
    return make_method(name, {}).single_replies()


def secure_list() -> str:
    """Returns the methods that run with secure sums, and those that do not."""
    single = {name: single_replies(name) for name in sorted(method_names())}
    runs = _code(name for name, phases in single.items() if not phases)
    others = [(f"`{name}`", _code(phases)) for name, phases in single.items() if phases]
    head = ("refused", "since the server needs each client's own reply to")
    return "\n".join([f"These methods run with secure sums: {runs}.", "", *_table(head, others)])


# ---- command line and recipes ----
def commands() -> str:
    """Returns every command with its options."""
    lines = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option"]
        usage = [_placeholder(each) for each in arguments] + ["[OPTIONS]"] * bool(options)
        lines += [f"### fedloom {name}", "", f"    {' '.join(['fedloom', name, *usage])}", ""]
        lines += [_escaped(getdoc(command.callback) or ""), ""]
        if options:
            lines += [*_table(("option", "default", "what it is"), map(_option, options)), ""]
    return "\n".join(lines)


def _placeholder(argument: Any) -> str:
    shown = (argument.name or "").upper() + ("..." if argument.nargs == -1 else "")
    return shown if argument.required else f"[{shown}]"


def _option(option: Any) -> tuple[str, str, str]:
    shown = _code((*option.opts, *option.secondary_opts))
    unset = option.default in (None, "", False) or callable(option.default) or not option.default
    return shown, "" if unset else f"`{option.default}`", _escaped(option.help or "")


def recipe_settings() -> str:
    """Returns the tables of a recipe with all their keys."""
    lines = []
    for name, cls in TABLES.items():
        lines += [f"### [{name}]", "", _escaped((getdoc(cls) or "").partition("\n")[0]), ""]
        lines += [*settings_table(cls), ""]
    return "\n".join(lines)


def settings_table(cls: type) -> list[str]:
    """Returns the settings of a dataclass."""
    tuned = any(f.metadata.get("tune") for f in fields(cls))
    head = ("setting", "default", "valid", *(("tuned over",) if tuned else ()), "what it is")
    rows = []
    for f in fields(cls):
        tune = (f"`{f.metadata['tune']}`" if f.metadata.get("tune") else "",) if tuned else ()
        default = f"`{default_of(f)!r}`"
        rows.append((f"`{f.name}`", default, valid_values(f), *tune, _escaped(f.metadata["help"])))
    return _table(head, rows)


# ---- Python ----
def public_names() -> str:
    """Returns all of `fedloom`, by module."""
    titles = {"data": "Graphs and federations", "experiments": "Runs", "core": "Methods"}
    parts: dict[str, list[str]] = {}
    for module, names in fedloom._MODULES.items():
        title = titles.get(module.partition(".")[0], "Errors")
        parts.setdefault(title, []).extend(f"fedloom.{module}.{name}" for name in names)
    order = ["Graphs and federations", "Runs", "Methods", "Errors"]
    return "\n".join(line for title in order for line in _reference(title, parts[title]))


def _is_extension_name(path: str) -> bool:
    return path.rpartition(".")[2] in fedloom.api.__all__


def extension_names() -> str:
    """Returns all of `fedloom.api`: classes with their members, then functions."""
    found: dict[str, list[str]] = {"Classes": [], "Functions and decorators": []}
    first = ("Client", "Server", "Replies", "Method", "Plugin", "Phase", "Computed", "Facts")
    for name in (*first, *(n for n in fedloom.api.__all__ if n not in first)):
        value = getattr(fedloom.api, name)
        module = getattr(value, "__module__", "")
        if isinstance(value, type) and module.startswith("fedloom."):
            found["Classes"].append(f"{module}.{name}")
        elif callable(value) and module.startswith("fedloom."):
            found["Functions and decorators"].append(f"{module}.{value.__name__}")
    return "\n".join(line for t, names in found.items() for line in _reference(t, names, True))


def _reference(title: str, names: Iterable[str], members: bool = False) -> list[str]:
    lines = [f"## {title}", ""]
    for name in names:
        lines += [f"::: {name}"]
        if members:
            lines += ["    options:", "      members: null", "      show_if_no_docstring: false"]
            lines += [f'      filters: ["!^_", "!^({FOR_ENGINES})$"]']
        elif _is_extension_name(name):  # references lead to the other page
            lines += ["    options:", "      skip_local_inventory: true"]
        lines += [""]
    return lines


# ---- Markdown ----
def _docstring(text: str) -> Iterator[str]:
    """Gives a docstring's lines, indented parts as blocks."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        block: list[str] = []
        for line in part.splitlines():
            if line.startswith("    "):
                block.append(line)
                continue
            yield from _fenced(block)
            block = []
            yield _escaped(line)
        yield from _fenced(block)
        yield ""


def _fenced(block: Sequence[str]) -> list[str]:
    return ["", "```text", *(line[4:] for line in block), "```", ""] if block else []


def _escaped(text: str) -> str:
    """Escapes what Markdown would take for its own, outside of `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[\]|])", r"\\\1", p) for p in parts)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines]


GENERATED: Mapping[str, Any] = {
    "methods": methods_table,
    "disclosure": disclosure_table,
    "secure-methods": secure_list,
    "commands": commands,
    "recipe-settings": recipe_settings,
    "public-names": public_names,
    "extension-names": extension_names,
}

"""Method tables: a method in full, as `fedloom methods NAME` prints it."""

from __future__ import annotations

from dataclasses import fields
from inspect import getdoc, getmodule
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fedloom.core.disclosure import server_learns
from fedloom.core.method import Method
from fedloom.core.phase import phases_of
from fedloom.core.settings import default_of, valid_values
from fedloom.experiments.report.tables import grid
from fedloom.privacy import measured


def method(name: str, cls: type[Method]) -> RenderableType:
    """Returns the description of a method: its file's docstring, its settings and its phases."""
    module = getmodule(cls)
    settings = grid(
        headings := ("field", "default", "valid", "tuned over", "description"), left=headings
    )
    for f in fields(cls):
        settings.add_row(
            f.name,
            repr(default_of(f)),
            valid_values(f),
            f.metadata.get("tune") or "",
            f.metadata["help"],
        )
    phases = grid(("phase", "takes", "answers"), left=("takes", "answers"))
    for key, phase in phases_of(cls).items():
        declared = {
            k: v if isinstance(v, str) else "(see the method)" for k, v in phase.reply.items()
        }
        answers = ", ".join(f"{k}: {v}" for k, v in declared.items())
        if phase.read_by:
            answers = f"peer messages for {phase.read_by}: {answers}"
        phases.add_row(key, ", ".join(phase.parameters) or "-", answers or "-")
    facts = [f"evaluation: {', '.join(cls.evaluations)}", f"tasks: {', '.join(cls.tasks)}"]
    single = cls().single_replies()
    needs = f"not possible, it needs each reply to {', '.join(single)}" if single else "possible"
    facts.append(f"secure sums: {needs}")
    if not cls.partial_participation:
        facts.append("all clients take part in every round (run.participation is 1)")
    facts.append(f"the server learns: {server_learns(cls)}")
    if cls.uses_cross_edges:
        facts.append("uses the edges between clients (partition.cross_edges)")
    if cls.discloses_to_peers:
        facts.append(f"other clients learn: {cls.discloses_to_peers}")
    facts.append("measured: " + "\n  ".join(measured.statement(name)))
    if not cls.predicts_unseen:
        facts.append(f"cannot predict for unseen items: that needs {cls.unseen_needs}")
    title, text = Text(name, style="bold"), Text(_reflowed(getdoc(module) or "") + "\n")
    return Group(
        title,
        text,
        Text("settings", style="italic"),
        settings,
        Text("\nphases", style="italic"),
        phases,
        Text("\n" + "\n".join(facts)),
    )


def _reflowed(text: str) -> str:
    """Returns a docstring with each paragraph on one line. Indented lines and lists stay."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        is_prose = not any(line.startswith((" ", "-", "*", "|", "#")) for line in lines)
        paragraphs.append(" ".join(lines) if is_prose else paragraph)
    return "\n\n".join(paragraphs)


def method_as_json(name: str, cls: type[Method]) -> dict[str, Any]:
    """Returns what `fedloom methods NAME --json` prints."""
    phases = {
        key: {
            "takes": list(phase.parameters),
            "answers": {
                k: v if isinstance(v, str) else "(see the method)" for k, v in phase.reply.items()
            },
            "read_by": phase.read_by or None,
        }
        for key, phase in phases_of(cls).items()
    }
    settings = {
        f.name: {
            "default": default_of(f),
            "valid": valid_values(f),
            "tune": f.metadata.get("tune"),
            "help": f.metadata["help"],
        }
        for f in fields(cls)
    }
    return {
        "name": name,
        "description": getdoc(getmodule(cls)) or "",
        "evaluations": list(cls.evaluations),
        "tasks": list(cls.tasks),
        "needs_each_reply_to": list(cls().single_replies()),
        "server_learns": server_learns(cls),
        "peers_learn": cls.discloses_to_peers,
        "measured": measured.statement(name),
        "uses_cross_edges": cls.uses_cross_edges,
        "predicts_unseen": cls.predicts_unseen,
        "partial_participation": cls.partial_participation,
        "needs_of_model": cls.needs_of_model,
        "settings": settings,
        "phases": phases,
    }

"""Manual pages, from what ``--help`` is made from: ``python deploy/man_pages.py DIRECTORY``.

One page a command, ``stockade-run(1)``, and ``stockade(1)`` for the whole. Run it with a Python
that has Stockade installed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import typer.main

from stockade.supervisor.cli.main import COMMANDS, build_app

FILES: Final = (
    ("/etc/stockade/stockade.toml", "The worker's configuration; each key explains itself there."),
    ("/var/lib/stockade", "Journal, output and work directories."),
    ("/run/stockade", "Sockets, and records of running tasks."),
)
STATUS: Final = (
    ("0", "Done."),
    ("1", "Not done; the reason is on standard error."),
    ("2", "The command line is wrong."),
    ("78", "The configuration cannot be used, and the message says why."),
)


def pages() -> Iterator[tuple[str, str]]:
    """Each page's file name and text."""
    root: Any = typer.main.get_command(build_app(list(COMMANDS)))
    context = root.context_class(root, info_name="stockade", **root.context_settings)
    commands = [
        (
            f"stockade-{name}",
            command,
            command.context_class(command, info_name=name, parent=context),
        )
        for name, command in root.commands.items()
    ]
    see = [(f".BR {name} (1)", _first_line(command)) for name, command, _ in commands]
    yield (
        "stockade.1",
        _page("stockade", root, context)
        + _list("COMMANDS", [(_text(one), text) for one, text in see], raw=True)
        + _list("FILES", FILES)
        + _list("EXIT STATUS", STATUS),
    )
    for name, command, own in commands:
        yield f"{name}.1", _page(name, command, own) + '.SH "SEE ALSO"\n.BR stockade (1)\n'


def _page(name: str, command: Any, context: Any) -> str:
    words = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    page = f'.TH {name.upper()} 1 "" "stockade {version("stockade")}" "User Commands"\n'
    page += f".SH NAME\n{name} \\- {_text(_first_line(command).rstrip('.'))}\n"
    page += f".SH SYNOPSIS\n.B {_text(words)}\n"
    page += ".SH DESCRIPTION\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        page += f".PP\n{_text(' '.join(paragraph.split()))}\n"
    page += _parameters(command, context)
    if context.parent is None:
        return page
    for child_name, child in getattr(command, "commands", {}).items():
        own = child.context_class(child, info_name=child_name, parent=context)
        usage = " ".join([own.command_path, *child.collect_usage_pieces(own)])
        page += f'.SH "{_text(own.command_path.upper())}"\n.B {_text(usage)}\n'
        page += f".PP\n{_text(' '.join((child.help or '').split()))}\n"
        page += _parameters(child, own, ".SS")
    return page


def _parameters(command: Any, context: Any, level: str = ".SH") -> str:
    records = [param.get_help_record(context) for param in command.get_params(context)]
    return _list("OPTIONS", [record for record in records if record is not None], level=level)


def _list(title: str, entries: Any, *, level: str = ".SH", raw: bool = False) -> str:
    text = f'{level} "{title}"\n' if entries else ""
    for name, explanation in entries:
        head = name.replace("\\-", "-") if raw else f".B {_text(name)}"
        text += f".TP\n{head}\n{_text(' '.join(explanation.split()))}\n"
    return text


def _first_line(command: Any) -> str:
    return inspect.cleandoc(command.help or "").split("\n", 1)[0]


def _text(text: str) -> str:
    """As roff has it: hyphens that can be copied, and no line that is taken for a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith(".") and not text.startswith(".BR ") else text


def main() -> None:
    """Write them all."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (target / name).write_text(text)


if __name__ == "__main__":
    main()

"""The command ``stockade``: finds the group of commands that is asked for and runs it.

Only the module of the command asked for is imported, so that ``stockade run`` starts quickly.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer
import typer.completion

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.cli.standard_streams import make_usable
from stockade.supervisor.errors import ConfigError

EXIT_FAILURE: Final = 1
# sysexits.h EX_CONFIG: a service manager should not try again.
EXIT_CONFIG: Final = 78
# What `run` ends with when Stockade itself failed, whatever the kind.
EXIT_RUN: Final = 125

# What the shells' completion files set.
_COMPLETION: Final = "_STOCKADE_COMPLETE"
_PACKAGE: Final = "stockade.supervisor.cli"
# Command name -> module and the attribute that is the command: a function, or an app of its own.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "run": ("run", "run"),
    "worker": ("worker", "worker"),
    "dev": ("dev", "dev"),
    "scheduler": ("scheduler", "scheduler"),
    "submit": ("submit", "submit"),
    "ps": ("operate", "ps"),
    "logs": ("operate", "logs"),
    "cancel": ("operate", "cancel"),
    "drain": ("operate", "drain"),
    "reload": ("operate", "reload"),
    "explain": ("operate", "explain"),
    "deadletters": ("deadletters", "app"),
    "top": ("top", "top"),
    "doctor": ("doctor", "doctor"),
    "config": ("config", "app"),
}
# Everything after the command to run is the command's own.
_PASSES_ARGUMENTS_ON: Final = frozenset({"run"})


def build_app(names: Sequence[str]) -> typer.Typer:
    """The command line with these commands; importing their modules only."""
    app = typer.Typer(
        name="stockade",
        help="A task worker for Linux that runs each task in an isolated child with hard limits.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        elif name in _PASSES_ARGUMENTS_ON:
            app.command(name, context_settings={"allow_interspersed_args": False})(command)
        else:
            app.command(name)(command)
    return app


def _print_version(asked: bool) -> None:  # noqa: FBT001 -- typer's callback signature
    if asked:
        print(f"stockade {importlib.metadata.version('stockade')}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None: ...


def main() -> None:
    """The console script's entry point. Ends the process; expected errors are one message each."""
    make_usable()
    sys.exit(_flushed(run_command(sys.argv[1:])))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit status."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    is_run = name == "run"
    if _COMPLETION in os.environ:
        # The shells' files, and what they ask while a line is typed.
        typer.completion.completion_init()  # type: ignore[attr-defined]
    try:
        app = build_app([name] if name else list(COMMANDS))
        app(args=arguments, prog_name="stockade")
    except CommandEnded as ended:
        return ended.status
    except SystemExit as error:
        # Usage errors and --help end here; a command that has a status of its own to give raises
        # CommandEnded, so that `run` can tell its command's 2 from its own usage error.
        status = error.code if isinstance(error.code, int) else EXIT_FAILURE
        return EXIT_RUN if is_run and status else status
    except ConfigError as error:
        _complain(error)
        return EXIT_RUN if is_run else EXIT_CONFIG
    except StockadeError as error:
        _complain(error)
        return EXIT_RUN if is_run else EXIT_FAILURE
    except BrokenPipeError:
        # Whoever read our output is gone, as in `stockade ps | head`; nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return 0


def _flushed(status: int) -> int:
    """The status, once all that was printed is out; a failure when it cannot be."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            print(f"stockade: cannot write the output: {error.strerror}", file=sys.stderr)
        # Or Python tries once more at its end, with words and a status of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or EXIT_FAILURE
    return status


def _complain(error: Exception) -> None:
    print(f"stockade: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""``python -m stockade.supervisor.scheduler``: the scheduler without the rest of the command."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final

from stockade.supervisor.scheduler.app import run
from stockade.supervisor.scheduler.errors import SchedulerError, SettingsError
from stockade.supervisor.scheduler.settings import (
    DEFAULT_LISTEN,
    default_state_dir,
    make_settings,
)

EX_CONFIG: Final = 78


def main() -> int:
    """Runs the scheduler; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="stockade scheduler", description="The embedded single-host scheduler alone."
    )
    parser.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT")
    parser.add_argument("--state-dir", default=default_state_dir(os.environ), metavar="DIR")
    parser.add_argument("--allow-networks", default="", metavar="NETWORK,...")
    arguments = parser.parse_args()
    networks = [text for text in arguments.allow_networks.split(",") if text.strip()]
    try:
        run(make_settings(arguments.listen, arguments.state_dir, networks))
    except SettingsError as error:
        print(f"stockade scheduler: {error}", file=sys.stderr)
        return EX_CONFIG
    except SchedulerError as error:
        print(f"stockade scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

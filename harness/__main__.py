"""The `logitgate` command and `python -m harness`: signals first, so that no import ends in a traceback."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130


def run() -> NoReturn:
    """Run this process's command line. SIGTERM ends it as Ctrl-C does, so that its engine is shut down too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from harness.cli import main

        code = main()
    except KeyboardInterrupt:  # during the import; `main` itself raises nothing
        code = EXIT_INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    run()

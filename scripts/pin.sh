#!/usr/bin/env bash
# Write constraints.txt from what .venv holds, after a deliberate upgrade there: names and versions, no addresses.
set -euo pipefail
cd "$(dirname "$0")/.."

{
    echo "# Everything .venv holds for Python 3.11 on Linux with the CPU engine. Written by scripts/pin.sh."
    echo "# It is complete: scripts/setup.sh installs it with --no-deps."
    .venv/bin/python -m pip --disable-pip-version-check freeze --all --exclude pip --exclude wheel --exclude logitgate 2>/dev/null |
        grep -E '^[A-Za-z0-9._-]+==' |
        sed -E 's/^(intel-.*)$/\1 ; platform_machine == "x86_64"/'
} >constraints.txt

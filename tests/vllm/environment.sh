#!/usr/bin/env bash
# Make the environment in which the real vLLM engine runs on a CPU: environment.sh DIRECTORY
set -eu
venv=${1:?usage: environment.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)

# vLLM's CPU kernels are linked against libnuma.
if ! ldconfig -p | grep -q 'libnuma\.so\.1'; then
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "libnuma.so.1 is missing; install it (Debian: apt-get install libnuma1) and try again" >&2
    exit 1
  fi
  apt-get update -q && apt-get install -q -y --no-install-recommends libnuma1
fi

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$here/requirements.txt"
"$venv/bin/python" -m pip install --quiet --no-deps --editable "$here/../.." --editable "$here/../../client/tools"

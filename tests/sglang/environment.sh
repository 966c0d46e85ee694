#!/usr/bin/env bash
# Make the environment in which the real SGLang engine runs on a CPU: environment.sh DIRECTORY
set -eu
venv=${1:?usage: environment.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)
say() { echo "$venv: $1" >&2; }

say "new environment of ${PYTHON:-python3}"
"${PYTHON:-python3}" -m venv "$venv"
say "from the package index SGLang and what it needs on the CPU: $(grep -c == "$here/requirements.txt") packages; some GB on disk"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$here/requirements.txt"
say "kvd and its tools from this checkout, from the package index what builds them: 6 packages; 2 MB"
"$venv/bin/python" -m pip install --quiet --no-deps --editable "$here/../.." --editable "$here/../../client/tools"

# SGLang has no CPU wheel of its kernels, and the wheel of torchvision needs CUDA for its operators:
# stand-ins for the few functions that are asked for.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$here/stand_ins" >"$site/kvd_sglang_stand_ins.pth"

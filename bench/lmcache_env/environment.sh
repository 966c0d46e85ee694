#!/usr/bin/env bash
# Make the environment with LMCache over one with vLLM, whose packages it uses: environment.sh DIRECTORY VLLM
set -eu
venv=${1:?usage: environment.sh DIRECTORY VLLM} vllm=${2:?usage: environment.sh DIRECTORY VLLM}
here=$(cd "$(dirname "$0")" && pwd)
say() { echo "$venv: $1" >&2; }

rm -rf "$venv"
"$vllm/bin/python" -m venv --without-pip "$venv"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Its own packages are found first.
echo "import site; site.addsitedir('$(packages "$vllm")')" > "$(packages "$venv")/zz_vllm.pth"
# Without dependencies, among them torch with CUDA.
say "from the package index LMCache: 1 package"
"$vllm/bin/python" -m pip --python "$venv/bin/python" install --quiet --no-deps --requirement "$here/requirements.txt"
cp "$here/sitecustomize.py" "$(packages "$venv")"
"$venv/bin/python" -c 'import lmcache, torch; assert torch.version.cuda is None, torch.__version__'

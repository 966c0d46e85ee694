"""Runs vLLM's own tests of its offloading connector on kvd's halves, see `kvd_halves.py`.

    PYTHONPATH=. .venv-vllm/bin/python -m tests.vllm.upstream_suite.run [pytest's arguments]

The tests are those of the installed release. They come from its sdist, whose SHA-256 is pinned in
`releases.toml`, and are unpacked once into `build/vllm-tests/`. With arguments, such as
`-k lookup`, tests may be missing; without them the number of passed tests is checked as well.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.parse
import urllib.request
from pathlib import Path

import vllm
from pip._internal.commands import create_command

SUITE = Path(__file__).parent
TESTS = SUITE.parents[2] / "build/vllm-tests"
TIMEOUT_SECONDS = 60

UNIT = "tests/v1/kv_connector/unit"
FOLDER = f"{UNIT}/offloading_connector"
MEMBERS = {
    *(f"{package}/__init__.py" for package in ("tests", "tests/v1", "tests/v1/kv_connector", UNIT)),
    f"{UNIT}/conftest.py",
    f"{UNIT}/utils.py",
}
# The model of vLLM's tests, of which they need the configuration only. A folder of this name is
# found before the Hub is asked.
MODEL = "facebook/opt-125m"
MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}


def sdist_url(filename: str) -> str:
    """Return the address of a file of vLLM's in the index that pip is configured to use."""
    options, _ = create_command("download").parse_args([])
    page = f"{options.index_url.rstrip('/')}/vllm/"
    with urllib.request.urlopen(page, timeout=TIMEOUT_SECONDS) as reply:  # noqa: S310  # pip's index
        links: list[str] = re.findall(r'href="([^"#]+)', reply.read().decode())
    for link in links:
        if link.endswith(f"/{filename}"):
            return urllib.parse.urljoin(page, link)
    sys.exit(f"{page} has no {filename}")


def unpack_tests(release: str, sha256: str, folder: Path) -> None:
    """Download a release's sdist, check its hash, and unpack what the tests need."""
    filename = f"vllm-{release}.tar.gz"
    with tempfile.TemporaryFile() as sdist:
        with urllib.request.urlopen(sdist_url(filename), timeout=TIMEOUT_SECONDS) as reply:  # noqa: S310  # pip's index
            shutil.copyfileobj(reply, sdist)
        sdist.seek(0)
        actual = hashlib.file_digest(sdist, "sha256").hexdigest()
        if actual != sha256:
            sys.exit(f"{filename} has the SHA-256 {actual}, not {sha256}")
        sdist.seek(0)
        with tarfile.open(fileobj=sdist) as archive:
            for member in archive:
                member.name = member.name.partition("/")[2]
                if member.name in MEMBERS or member.name.startswith(f"{FOLDER}/"):
                    archive.extract(member, folder, filter="data")
    model = folder / MODEL
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))


def tests_of(release: str) -> Path:
    """Return the folder with a release's tests, unpacked if they are not there yet."""
    releases = tomllib.loads((SUITE / "releases.toml").read_text())
    if release not in releases:
        sys.exit(f"vLLM {release} is not in {SUITE / 'releases.toml'}: add its sdist's SHA-256")
    folder = TESTS / release
    if not folder.exists():
        TESTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TESTS) as unfinished:
            unpack_tests(release, releases[release]["sha256"], Path(unfinished) / release)
            (Path(unfinished) / release).rename(folder)
    return folder


def main(arguments: list[str]) -> int:
    """Run the tests; the exit status is pytest's."""
    folder = tests_of(vllm.__version__.partition("+")[0])
    # vLLM's tests are the package `tests` there, found first in the working directory.
    paths = [str(SUITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    command = [
        *(sys.executable, "-m", "pytest", "-p", "kvd_halves", "-p", "no:cacheprovider", "-q"),
        *("-c", str(SUITE / "pytest.ini"), "--rootdir", str(folder)),
        *(arguments or ["--whole-suite"]),
        FOLDER,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(command, check=False, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

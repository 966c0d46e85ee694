"""Run the session that docs/operations.md shows, and write what it printed there.

Everything happens in a temporary directory that stands for ``/``: two wheels are built, the
second with a higher version, the first is installed, serves an engine, is drained and replaced
by the second. `make operations-transcript` runs it; it needs a package index for pip.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "operations.md"
LEFT_OUT = (".venv*", ".git", ".*_cache", ".hypothesis", "out", "build", "dist")
BEGIN, END = "<!-- transcript: begin -->\n", "<!-- transcript: end -->"
DONE = "==done=="
# Other daemons on the machine that runs the session, as `kvd doctor` lists them.
OTHERS = re.compile(r"^warn  other daemon: .*\n +→ .*\n", re.MULTILINE)

STEPS = """
python3 -m venv /opt/kvd
/opt/kvd/bin/pip install --quiet '/tmp/kvd_offload-0.1.0-py3-none-any.whl[daemon]'
/opt/kvd/bin/pip install --quiet /tmp/kvd_offload_tools-0.1.0-py3-none-any.whl
export PATH=/opt/kvd/bin:$PATH KVD_CONFIG=/etc/kvd/kvd.toml
cat /etc/kvd/kvd.toml
kvd config check /etc/kvd/kvd.toml
kvd doctor
kvd serve 2>> /var/log/kvd.log &
kvd status --wait 30
kvd selftest | tail -n 2
python engine.py /run/kvd
kvd namespaces
kvd drain --wait 30s
kvd status --json | jq -r '.checks[] | select(.ok | not) | .text'
kvd resume
kvd drain --wait 30s
/opt/kvd/bin/pip install --quiet --upgrade '/tmp/kvd_offload-0.1.1-py3-none-any.whl[daemon]'
kill %1; wait %1
kvd serve 2>> /var/log/kvd.log &
kvd status --wait 30 | head -n 1
python engine.py /run/kvd
kvd resume
grep -i drain /var/log/kvd.log
"""


def main() -> int:
    """Write the page anew; the exit status."""
    with tempfile.TemporaryDirectory(prefix="kvd-session-") as folder:
        root = Path(folder)
        for name in ("opt", "etc/kvd", "run", "var/log", "tmp", "dev/shm", "home"):
            (root / name).mkdir(parents=True)
        build(root / "tmp")
        (root / "etc/kvd/kvd.toml").write_text(
            f'runtime_dir = "{root}/run/kvd"\ncpu_bytes = "256MiB"\nhttp_listen = "off"\n'
        )
        (root / "home/engine.py").write_text(example())
        text = session(root)
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n```console\n{text}```\n\n{END}{tail}", encoding="utf-8")
    return 0


def build(target: Path) -> None:
    """Build this tree's wheel, one with the version that follows, and the tools'."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(target)]
    subprocess.run([*pip, str(REPOSITORY / "client" / "tools")], check=True)
    for version in ("0.1.0", "0.1.1"):
        tree = target / version
        shutil.copytree(
            REPOSITORY,
            tree,
            ignore=shutil.ignore_patterns(*LEFT_OUT),
        )
        file = tree / "kvd" / "version.py"
        file.write_text(file.read_text().replace('"0.1.0"', f'"{version}"'))
        subprocess.run([*pip, str(tree)], check=True)
        shutil.rmtree(tree)


def example() -> str:
    """The engine of docs/writing-a-client.md."""
    page = (REPOSITORY / "docs" / "writing-a-client.md").read_text(encoding="utf-8")
    match = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    if match is None:
        raise SystemExit("docs/writing-a-client.md has no example any more")
    return match[1]


def session(root: Path) -> str:
    """Type the steps into one shell; what a terminal would show."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root / "home"),
        "COLUMNS": "100",
        "TERM": "dumb",
        "LANG": "C.UTF-8",
    } | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    shell = subprocess.Popen(
        ["bash", "--norc"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=root / "home",
        env=environment,
    )
    if shell.stdin is None or shell.stdout is None:
        raise SystemExit("no pipes")
    shown = []
    try:
        for step in STEPS.strip().splitlines():
            real = re.sub(r"(?<![\w/.])/(opt|etc|run|var|tmp)\b", rf"{root}/\1", step)
            shell.stdin.write(f"{real}\necho {DONE}$?\n")
            shell.stdin.flush()
            lines: list[str] = []
            while not (line := shell.stdout.readline()).startswith(DONE):
                if not line:
                    raise SystemExit(f"the shell ended at: {step}\n{''.join(lines)}")
                lines.append(line)
            status = line.removeprefix(DONE).strip()
            shown.append(f"$ {step}\n" + "".join(lines).replace(str(root), ""))
            if status != "0":
                shown.append(f"[exit status {status}]\n")
            sys.stderr.write(shown[-1])
    finally:
        shell.stdin.write("kill %1 %2 2>/dev/null; wait; kvd purge; exit\n")
        shell.stdin.close()
        shell.wait(timeout=60)
    return re.sub(r" +\n", "\n", OTHERS.sub("", "".join(shown)))


if __name__ == "__main__":
    sys.exit(main())

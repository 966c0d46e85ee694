"""The plug-in and the version check with a vLLM that is a few files: no engine is needed."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
TAKES = """
    class KVConnectorFactory:
        taken = []
        @classmethod
        def register_connector(cls, name, module_path, class_name):
            if cls.taken:
                raise ValueError(f"Connector '{name}' is already registered.")
            cls.taken.append((name, module_path, class_name))
    """


def run(folder: Path, program: str, factory: str = TAKES) -> str:
    """What a process prints, with such a vLLM; it ends well."""
    root = folder / "vllm"
    file = folder / FACTORY
    file.parent.mkdir(parents=True)
    for package in [parent for parent in file.parents if root in (parent, *parent.parents)]:
        (package / "__init__.py").touch()
    (root / "__init__.py").write_text("__version__ = '0.11.2'\n")
    file.write_text(dedent(factory))
    ended = subprocess.run(
        [sys.executable, "-c", dedent(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_the_factory_learns_the_name_once(tmp_path: Path) -> None:
    """Also when the plug-in is run again, as each of vLLM's processes may do; the client waits."""
    out = run(
        tmp_path,
        """
        import sys
        from kvd_vllm_plugin import register
        register()
        register()
        assert "kvd_client" not in sys.modules
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        print(KVConnectorFactory.taken)
        """,
    )
    assert out.strip() == "[('KvdConnector', 'kvd_client.vllm', 'KvdConnector')]"


@pytest.mark.parametrize(
    "factory",
    ["", "class KVConnectorFactory:\n    register_connector = 1", "import no_such_module"],
)
def test_a_factory_of_another_kind_stops_nobody(tmp_path: Path, factory: str) -> None:
    """An engine that does not use kvd starts; one line says how the connector is named instead."""
    out = run(tmp_path, "from kvd_vllm_plugin import register; register()", factory)
    assert '"kv_connector_module_path": "kvd_client.vllm"' in out


# --------------------------------------------------------------- versions


def test_a_vllm_that_cannot_work_is_named_in_one_sentence(tmp_path: Path) -> None:
    """Not an ImportError: the release, what it lacks, the tested ones, and what to do."""
    out = run(
        tmp_path,
        """
        from kvd_client import UnsupportedVllm
        try:
            import kvd_client.vllm
        except UnsupportedVllm as error:
            assert error.__suppress_context__
            print(error)
        """,
    )
    (line,) = out.splitlines()
    assert line.startswith("kvd's connector cannot work with vLLM 0.11.2: ")
    assert "vllm." in line
    assert "it was tested with vLLM 0.32: install that, or leave --kv-transfer-config out" in line

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
TAKEN = "('KvdConnector', 'kvd_client.vllm', 'KvdConnector')"


def run(folder: Path, program: str, factory: str = TAKES, version: str = "0.11.2") -> str:
    """What a process prints, with such a vLLM; it ends well."""
    root = folder / "vllm"
    file = folder / FACTORY
    file.parent.mkdir(parents=True)
    for package in [parent for parent in file.parents if root in (parent, *parent.parents)]:
        (package / "__init__.py").touch()
    (root / "__init__.py").write_text(f"__version__ = {version!r}\n")
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


def test_the_name_is_known_as_soon_as_the_factory_is(tmp_path: Path) -> None:
    """Registering imports nothing of vLLM; whoever imports the factory finds the name there."""
    out = run(
        tmp_path,
        """
        import sys
        from kvd_vllm_plugin import register
        register()
        register()
        assert not {"vllm", "torch", "kvd_client"} & sys.modules.keys()
        from vllm.distributed.kv_transfer.kv_connector import factory
        print(factory.KVConnectorFactory.taken)
        assert type(factory.__loader__) is type(factory.__spec__.loader)
        assert type(factory.__loader__).__name__ == "SourceFileLoader"
        assert not [finder for finder in sys.meta_path if "kvd" in repr(finder)]
        """,
    )
    assert out.strip() == f"[{TAKEN}]"


def test_a_factory_that_is_there_learns_the_name_at_once(tmp_path: Path) -> None:
    """Also when the plug-in is run again, as each of vLLM's processes may do."""
    out = run(
        tmp_path,
        """
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from kvd_vllm_plugin import register
        register()
        register()
        print(KVConnectorFactory.taken)
        """,
    )
    assert out.strip() == f"[{TAKEN}]"


@pytest.mark.parametrize("factory", ["", "class KVConnectorFactory:\n    register_connector = 1"])
@pytest.mark.parametrize("first", ["register()", "import_factory()"])
def test_a_factory_of_another_kind_stops_nobody(tmp_path: Path, factory: str, first: str) -> None:
    """An engine that does not use kvd starts; one line says how the connector is named instead."""
    out = run(
        tmp_path,
        f"""
        import importlib
        from kvd_vllm_plugin import FACTORY, register
        def import_factory():
            importlib.import_module(FACTORY)
        {first}
        import_factory()
        register()
        """,
        factory,
    )
    assert '"kv_connector_module_path": "kvd_client.vllm"' in out


def test_a_factory_that_is_not_there_stops_nobody(tmp_path: Path) -> None:
    """The import fails as it would without the plug-in."""
    out = run(
        tmp_path,
        f"""
        import os
        from kvd_vllm_plugin import register
        register()
        os.remove({FACTORY!r})
        try:
            import vllm.distributed.kv_transfer.kv_connector.factory
        except ModuleNotFoundError as error:
            print(error)
        """,
    )
    assert out.strip() == "No module named 'vllm.distributed.kv_transfer.kv_connector.factory'"


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


def test_what_is_not_vllms_is_not_blamed_on_it(tmp_path: Path) -> None:
    """A package that is missing beside vLLM is reported as Python reports it."""
    out = run(
        tmp_path,
        """
        import sys
        sys.modules["msgspec"] = None
        try:
            import kvd_client.vllm
        except ModuleNotFoundError as error:
            print(error.name)
        """,
    )
    assert out.strip() == "msgspec"

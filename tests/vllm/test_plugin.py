"""What a user types: three keys, and vLLM knows whose connector that is."""

import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvd_vllm_plugin
from kvd_client.vllm import KvdConnector
from kvd_client.vllm.options import read_options
from kvd_client.vllm.versions import TESTED, release, untested
from tests.vllm.configs import engine_config, full, sized
from tests.vllm.support import ROOT

THREE = {
    "kv_connector": "KvdConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
DOCUMENTS = (
    "docs/vllm.md",
    "docker/compose.yaml",
    "deploy/kubernetes/engine.yaml",
    "deploy/kubernetes/sidecar.yaml",
)


def test_the_plug_in_is_installed() -> None:
    """VLLM finds it where it looks for plug-ins that every process runs."""
    (found,) = entry_points(group="vllm.general_plugins", name="kvd")
    assert found.load() is kvd_vllm_plugin.register


def test_vllms_plug_ins_make_the_name_known() -> None:
    """What vLLM runs in each process does not import the connector; its name does."""
    program = """
        import sys
        from vllm.config import KVTransferConfig
        import vllm.plugins
        vllm.plugins.load_general_plugins()
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        print("seen", "kvd_client" in sys.modules)
        typed = KVTransferConfig(
            kv_connector="KvdConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        )
        print("seen", KVConnectorFactory.get_connector_class(typed).__module__)
        print("seen", KVConnectorFactory.supports_hma_config(typed))
    """
    ended = subprocess.run(
        [sys.executable, "-c", dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert ended.returncode == 0, ended.stderr
    # vLLM logs to the same stream.
    seen = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("seen ")]
    connector = "kvd_client.vllm.connector"
    assert seen == [["False"], [connector], ["True"]]


@pytest.mark.parametrize(("version", "warned"), [(vllm.__version__, 0), ("0.33.1", 1)])
def test_an_untested_vllm_is_warned_of_once(
    version: str,
    warned: int,
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scheduler's connector says so in one line, the ranks' do not; the engine starts."""
    monkeypatch.setattr("kvd_client.vllm.connector._log_as_vllm_does", lambda: None)
    monkeypatch.setattr(vllm, "__version__", version)
    vllm_config = engine_config(tmp_path, {"runtime_dir": str(runtime_dir)})
    kv_cache_config = sized(vllm_config, full(["a", "b"]))
    for role in KVConnectorRole:
        KvdConnector(vllm_config, role, kv_cache_config).shutdown()
    texts = [record.getMessage() for record in caplog.records]
    assert sum(f"not tested with vLLM {version}, only with vLLM 0.32" in t for t in texts) == warned


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+g0123456", "0.32.0+cpu"])
def test_a_tested_release_needs_no_sentence(version: str) -> None:
    """Patches and builds of a tested release are that release."""
    assert release(version) in TESTED
    assert not untested(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "1.32.0", "dev", "0.320.0"])
def test_an_untested_release_is_named(version: str) -> None:
    """One sentence: which it is, which are tested, what to do."""
    text = untested(version)
    assert f"not tested with vLLM {version}, only with vLLM 0.32;" in text
    assert "install a tested release" in text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_documents_give_is_three_keys_and_options_that_exist(document: str) -> None:
    """Every configuration that a reader can copy is one that the connector takes."""
    text = (ROOT / document).read_text()
    given = re.findall(
        r"""--kv-transfer-config[\s'>-]*(\{.*?\})(?:'|\n *[a-z#-])""", text, re.DOTALL
    )
    assert given
    for config in map(json.loads, given):
        extra = config.pop("kv_connector_extra_config", {})
        assert config == THREE
        read_options(extra, {})

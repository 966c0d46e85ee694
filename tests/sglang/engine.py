"""A real SGLang engine on the CPU, in processes of its own that are always ended."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any, Self

from kvd_tools.demo_vllm.engine import kill_group
from kvd_tools.sglang_cpu import environment

START_SECONDS = 240.0
ANSWER_SECONDS = 120.0
LOG_TAIL = 6000
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What an engine has answered to one prompt.

    tokens: generated. logprobs: of each of these. cached: of the prompt's tokens, how many were
    not computed. aborted: why there is no full answer; else empty.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    aborted: str


class Engine:
    """One engine; ready once the context is entered.

    Args:
        model: a model's folder.
        log: takes what it prints.
        runtime_dir: of the kvd daemon that it uses; None: no external cache.
        linker: further settings of kvd's linker.
        options: of sglang.Engine.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        runtime_dir: Path | None = None,
        linker: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.log = log
        arguments: dict[str, Any] = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "attention_backend": "torch_native",
            "dtype": "float32",
            "mem_fraction_static": 0.05,
            "max_total_tokens": 4096,
            "disable_cuda_graph": True,
            "skip_server_warmup": True,
            **options,
        }
        if runtime_dir is not None:
            arguments |= {
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": {
                    "linker": "KvdLinker",
                    "linker_module_path": "kvd_client.sglang.linker",
                    "linker_extra_config": {"runtime_dir": str(runtime_dir), **(linker or {})},
                },
            }
        self._answers, theirs = os.pipe()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.serve", str(theirs), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=environment(ranks=options.get("tp_size", 1)),
                cwd=ROOT,
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)
        self._read = b""

    def __enter__(self) -> Self:
        try:
            assert self._receive(START_SECONDS) == "ready"
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End all its processes, as a crash would."""
        while kill_group(self._process.pid):
            time.sleep(0.02)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 4) -> list[Answer]:
        """Answers to prompts that are sent at once, in their order."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        replies = self._ask(
            {
                "input_ids": [list(prompt) for prompt in prompts],
                "sampling_params": sampling,
                "return_logprob": True,
            }
        )
        return [_answer(reply) for reply in replies]

    def flush(self) -> None:
        """Drop the engine's own cache."""
        assert self._ask("flush") is True

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._receive(ANSWER_SECONDS)
        assert not (isinstance(answer, dict) and "error" in answer), f"{answer}\n{self._tail()}"
        return answer

    def _receive(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            ready, _, _ = select([self._answers], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._answers, 2**20) if ready else b""
            if not more:
                why = "has ended" if ready else f"did not answer within {seconds:g} s"
                raise AssertionError(f"the engine {why}; its log ends:\n{self._tail()}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def _tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL:].decode(errors="replace")


def _answer(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    reason = meta["finish_reason"]
    return Answer(
        tokens=reply["output_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        cached=meta["cached_tokens"],
        aborted=reason["message"] if reason["type"] == "abort" else "",
    )

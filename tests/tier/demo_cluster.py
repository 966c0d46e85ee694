"""`make demo-cluster`: vLLM on two nodes that share a Mooncake Store.

Time to first token on the second node: of prompts that it computes, that its own pool has, and
that the first node has computed and stored. All on this machine: two daemons with pools of their
own, a master and a store, each node in a network namespace; vLLM on the CPU, one engine at a time.
Every answer is compared, token for token. Exit status 1 where one differs or nothing was found.

The engines compute in float32. Of a prompt whose beginning alone is found vLLM computes the rest in
other steps than of a cold one, and in bfloat16 it then rounds otherwise, which changes tokens.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import ClassVar

from kvd_proto.text import format_size
from kvd_tools.engine_demo import VllmWorkload
from kvd_tools.engine_server import Completion
from kvd_tools.models import ANSWER_TOKENS
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions
from tests.daemon.serving import Daemon, started_daemons
from tests.tier.mooncake_cluster import Cluster, why_not
from tests.waiting import eventually

LAYERS, PROMPTS, PROMPT_TOKENS = 9, 4, 2000
ATTACHED, HITS = "vllm:kv_offload_kvd_attached", "vllm:external_prefix_cache_hits"


class ExactWorkload(VllmWorkload):
    """Prompts whose answers do not depend on how much of them is found."""

    __slots__ = ()
    DTYPE_BYTES: ClassVar[int] = 4

    def write_options(self, place: Path, runtime_dir: Path) -> VllmServerOptions:
        """As `VllmWorkload` writes them, in float32."""
        return replace(VllmWorkload.write_options(self, place, runtime_dir), dtype="float32")


def serve(name: str, engine: VllmServer, prompts: list[list[int]]) -> tuple[list[Completion], int]:
    """Every prompt, one after another; the answers, and how many tokens were found."""
    before = engine.metric(HITS)
    answers = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    seconds = [answer.first_token_seconds for answer in answers]
    hits = int(engine.metric(HITS) - before)
    each = " ".join(f"{one:.2f}" for one in seconds)
    print(f"{name:<34}{median(seconds):6.3f} s  {hits:>7,} tokens found  {each}", flush=True)
    return answers, hits


def wait_kept(daemon: Daemon) -> int:
    """Until nothing more is on its way to the cluster; how many chunks it has kept."""

    def under_way() -> tuple[int, int]:
        (tier,) = daemon.status()["tiers"]
        (namespace,) = daemon.status()["namespaces"]
        kept: int = tier["counters"]["puts"]["ok"]
        return namespace["chunks"]["ready"] - kept, kept

    return eventually(under_way, lambda found: found[0] <= 0)[1]


def run(prompts: int, tokens: int) -> bool:
    """Run it; whether all was found and the same."""
    workload = ExactWorkload(LAYERS, 2 * prompts, tokens)
    first, *every = workload.make_prompts()
    shared, own = every[:prompts], every[prompts:]
    needed = (prompts + 1) * workload.longest * workload.token_bytes
    pool = workload.pool_bytes
    print(
        f"model: dense, {LAYERS} layers, random weights; {format_size(workload.token_bytes)} of KV"
        f" per token\npools: {format_size(pool)} on each node; load: prompts of {tokens:,} tokens\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path,
        # Room for what both nodes keep, and as much again for what Mooncake does not fill.
        Cluster.running(megabytes=(3 * needed) >> 20) as cluster,
        started_daemons(Path(path) / "run") as start,
    ):
        place = Path(path)
        daemons, options = [], []
        for name, keep in (("a", "all"), ("b", "asked")):
            node = cluster.add_node(name)
            tier = f"mooncake:master={cluster.master_address},keep={keep}"
            where = place / name / "run"
            daemon = start("--tier", tier, cpu_bytes=str(pool), where=where, before=node.command())
            daemons.append(daemon)
            written = workload.write_options(place, daemon.runtime_dir)
            options.append(written)
        with engine_of(options[0], place / "engine-a.log", first) as engine:
            stored, _ = serve("A: computed", engine, shared)
            print(f"A: {wait_kept(daemons[0]):,} chunks are kept in Mooncake Store\n", flush=True)
        with engine_of(options[1], place / "engine-b.log", first) as engine:
            computed, _ = serve("B: computed", engine, own)
            again, _ = serve("B: from its own pool", engine, own)
            loaded, hits = serve("B: from A, through Mooncake Store", engine, shared)
        (tier_of_b,) = daemons[1].status()["tiers"]
    times = [median(answer.first_token_seconds for answer in some) for some in (computed, loaded)]
    same = [a.tokens for a in stored + computed] == [a.tokens for a in loaded + again]
    gets = tier_of_b["counters"]["gets"]["ok"]
    print(
        f"\nFirst token on B: computing takes {times[0] / times[1]:.1f} times as long as loading"
        f" what A stored ({gets:,} chunks, {format_size(tier_of_b['counters']['get_bytes'])})."
        f" Answers are {'the same' if same else 'NOT THE SAME'}, token for token."
    )
    return same and hits > 0


@contextmanager
def engine_of(options: VllmServerOptions, log: Path, prompt: list[int]) -> Iterator[VllmServer]:
    """An engine that has done everything once, with the daemon behind it."""
    with VllmServer(options, log) as engine:

        def attached() -> float:
            engine.generate([prompt], ANSWER_TOKENS)  # vLLM renews the metric with every step
            return engine.metric(ATTACHED)

        eventually(attached)
        yield engine


if __name__ == "__main__":
    if reason := why_not():
        raise SystemExit(f"no Mooncake cluster can be started here: {reason}")
    sys.exit(not run(PROMPTS, PROMPT_TOKENS))

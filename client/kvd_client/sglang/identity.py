"""Which SGLang engines may share chunks: everything that the KV's bytes depend on.

Prompt tokens, LoRA and cache salts are in SGLang's page hashes; layers and pages are in the
registered layout. The rest is here. A difference too many costs misses, a difference too few
wrong tokens. Each rank of tensor parallelism has chunks of its own, but where all hold the same
bytes: then ranks share them.
"""

from typing import Any

import sglang

from kvd_client import Fingerprint
from kvd_client.adapters import digest, hub_commits, weight_files
from kvd_client.sglang.pages import PagePool


def fingerprint(
    server_args: Any, pool: PagePool, pool_class: str, place: str, label: str
) -> Fingerprint:
    """Return the fingerprint of one pool of one rank.

    Args:
        server_args: SGLang's.
        pool: whose chunks are named.
        pool_class: of the device pool, and its layout.
        place: of the rank, in words.
        label: the operator's.
    """
    args = server_args
    model = str(args.model_path)
    draft = args.speculative_draft_model_path
    return Fingerprint(
        model=model,
        revision=digest(
            args.revision,
            weight_files(model),
            hub_commits(model, args.revision, args.download_dir),
            args.quantization,
            args.json_model_override_args,
            [args.load_format, args.random_seed if args.load_format == "dummy" else None],
            draft and [args.speculative_algorithm, draft, args.speculative_draft_model_revision],
        ),
        dtype=f"{args.dtype} weights, {args.kv_cache_dtype} cache",
        kv_layout=f"sglang {release(sglang.__version__)}, {pool.name}, {pool_class}",
        attention_backend=", ".join(
            str(name)
            for name in (
                args.attention_backend,
                args.prefill_attention_backend,
                args.decode_attention_backend,
            )
            if name
        ),
        parallelism=place,
        label=label,
    )


def release(version: str) -> str:
    """Return the version without build tags: every release may change interfaces and bytes."""
    return version.partition("+")[0]

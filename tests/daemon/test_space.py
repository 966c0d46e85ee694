"""One budget, models with chunks of different sizes: room goes to where it is used, every byte."""

from kvd_client import RankLayout
from tests.conftest import StartDaemon
from tests.daemon.engines import FACTOR, TENSORS, Engine, keys_of, make_layout, wait_hit

CPU_BYTES = 12 * 2**20


def layout_of(page: int) -> tuple[RankLayout, int]:
    """A layout with memory to store a whole pool from and to load it to; chunks in the pool."""
    chunks = CPU_BYTES // (page * TENSORS * FACTOR)
    return make_layout(blocks=2 * FACTOR * chunks + 1, page=page), chunks


def test_a_model_that_has_left_gives_every_byte_to_one_with_other_chunks(
    start_daemon: StartDaemon,
) -> None:
    """Models in turn, each with another chunk size, each fill all of the same daemon."""
    daemon = start_daemon(cpu_bytes=str(CPU_BYTES))
    for name, page in (("small", 4096), ("odd", 20480), ("large", 36864), ("small again", 4096)):
        layout, chunks = layout_of(page)
        keys = keys_of(name, chunks)
        with Engine(daemon.runtime_dir, name, 1, name, layout).wait_attached() as engine:
            assert engine.scheduler.num_chunks == chunks
            assert len(engine.store(keys)) == chunks
            wait_hit(engine, keys)
            assert engine.load(keys, first_block=FACTOR * chunks + 1) == (chunks, 0)
        namespaces = daemon.status()["namespaces"]
        assert {n["model"]: n["chunks"]["ready"] for n in namespaces}[name] == chunks
        # Others keep what fits into the rest, in which the model has no room for a chunk.
        kept = sum(n["chunks"]["ready"] * n["bytes_per_chunk"] for n in namespaces)
        assert kept <= CPU_BYTES
    assert daemon.status()["pid"] == daemon.process.pid


def test_two_models_at_work_share_the_budget_and_strand_nothing(
    start_daemon: StartDaemon,
) -> None:
    """A newcomer gets its fair half from a model that has all; when that leaves, all of it."""
    daemon = start_daemon(cpu_bytes=str(CPU_BYTES))
    (old_layout, old), (new_layout, new) = layout_of(4096), layout_of(20480)
    keys = keys_of("new", new)
    newcomer = Engine(daemon.runtime_dir, "new", 1, "new", new_layout)
    with newcomer:
        with Engine(daemon.runtime_dir, "old", 1, "old", old_layout).wait_attached() as first:
            assert len(first.store(keys_of("old", old))) == old
            wait_hit(first, keys_of("old", old))
            newcomer.wait_attached()
            half = len(newcomer.store(keys[: new // 2]))
            assert half >= new // 2 - 1  # a chunk may span the border
        stored = newcomer.store(keys[half:])
        wait_hit(newcomer, stored)
        report = {n["model"]: n["chunks"]["ready"] for n in daemon.status()["namespaces"]}
        assert report["new"] == new

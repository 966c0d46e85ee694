"""What docs/security.md promises of a running daemon, tried from an engine's place."""

import fcntl
import logging
import os
import stat
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvd.machine.memory import pool_directory_name
from kvd_client import LookupResult
from kvd_proto.codec import HEADER_BYTES, WIRE
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Attached, Ping, Pong, Step, Stepped
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import POISON, Engine, content, engine_of, keys_of, make_layout, wait_hit
from tests.daemon.hidden import assert_hidden, texts_of
from tests.daemon.serving import wait_state
from tests.descriptors import open_files
from tests.http.serving import over_tcp, over_unix
from tests.raw_client import RawClient, text_of
from tests.waiting import DEADLINE, eventually


def token_of(engine: Engine) -> bytes:
    """The token of an engine's worker, which only that process and the lane know."""
    lane = engine.workers[0]._jobs._lane
    assert lane is not None
    return lane._token


def test_sockets_and_files_are_for_the_group_only(shared_daemon: Daemon) -> None:
    """Directory 0750, sockets 0660, lock 0640; all of the pool is for the daemon's user alone."""
    runtime_dir = shared_daemon.runtime_dir
    with over_unix(shared_daemon) as client:
        assert client.get("/livez").status_code == 200
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o750
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in runtime_dir.iterdir()}
    assert modes.pop("kvd.lock") == 0o640
    assert modes.pop("kvd.pools") == 0o600
    assert {"broker.sock", "http.sock"} < modes.keys()
    assert set(modes.values()) == {0o660}
    area = Path("/dev/shm") / pool_directory_name(runtime_dir)
    assert stat.S_IMODE(area.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in area.iterdir()} == {0}


def test_no_client_has_the_pool_mapped_or_open(shared_daemon: Daemon, label: str) -> None:
    """An engine at work maps its own memory and the directory; the pool is the lane's alone.

    Of the pool's place it has the descriptions open, which it reads only.
    """
    daemon = shared_daemon
    with Engine(daemon.runtime_dir, label, world_size=1, model=label).wait_attached() as engine:
        keys = engine.stored("seen", 2)
        assert engine.load(keys) == (2, 0)
        place = str(Path("/dev/shm") / pool_directory_name(daemon.runtime_dir))
        assert "/dev/shm/kvd" not in Path("/proc/self/maps").read_text()
        files = {fd: file for fd, file in open_files().items() if file.startswith(place)}
        assert [file.split()[0].rpartition(".")[2] for file in files.values()] == ["descriptions"]
        for fd in files:
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        lanes = daemon.status()["lanes"]
        assert place in Path(f"/proc/{lanes[0]['pid']}/maps").read_text()


def test_nothing_listens_on_the_network_where_http_is_off(shared_daemon: Daemon) -> None:
    """No process of the daemon has an internet socket: requests and jobs know Unix sockets only."""
    with over_unix(shared_daemon) as client:
        assert client.get("/livez").status_code == 200
    broker = psutil.Process(shared_daemon.process.pid)
    for process in [broker, *broker.children(recursive=True)]:
        assert not process.net_connections("inet")


def test_leases_and_stores_of_another_engine_cannot_be_ended(daemon: Daemon) -> None:
    """An engine that guesses a lease or names a key gives up nothing of another engine."""
    with engine_of(daemon, "owner") as owner:
        keys = owner.stored("kept", 2)
        lease = owner.scheduler.prepare_load(keys)
        writing = keys_of("open", 2)
        ticket = owner.begin(writing)
        wait_state(daemon, writing=2, pinned=2)
        with engine_of(daemon, "forger") as forger:
            guesses = (*range(3), *range(lease.lease - 3, lease.lease + 3))
            forged = Step(dropped=tuple(writing), unpinned=guesses)
            assert isinstance(forger.scheduler._request(forged, DEADLINE), Stepped)
        chunks = daemon.status()["namespaces"][0]["chunks"]
        assert (chunks["writing"], chunks["pinned"]) == (2, 2)
        owner.fill(writing, 1)
        assert owner.moves("store", [1, 2, 3, 4], ticket.slots, ticket.generations)
        wait_hit(owner, writing)


def test_slots_on_loan_to_another_engine_cannot_be_used(daemon: Daemon) -> None:
    """An engine that names them in a step, or in a job, gets no chunk; their owner goes on."""
    with engine_of(daemon, "owner", steps=True) as owner, engine_of(daemon, "forger") as forger:
        mine, stolen = keys_of("mine", 2), keys_of("stolen", 2)
        ticket = owner.begin(mine)  # the daemon has not been told which keys these are for
        forger.fill(stolen, 1)
        assert not forger.moves("store", [1, 2, 3, 4], ticket.slots, ticket.generations)
        arrays = IntArray.of(ticket.slots, "u4"), IntArray.of(ticket.generations, "u8")
        forged = Step(keys=tuple(stolen), slots=arrays[0], generations=arrays[1])
        assert isinstance(forger.scheduler._request(forged, DEADLINE), Stepped)
        assert forger.scheduler.lookup_many(stolen) == [LookupResult.MISS] * 2
        owner.fill(mine, 1)
        assert owner.moves("store", [1, 2, 3, 4], ticket.slots, ticket.generations)
        owner.scheduler.end_step()
        wait_hit(owner, mine)
        assert owner.load(mine) == (2, 0)
        assert daemon.status()["counters"]["stores_lost"] == 2


def test_a_neighbour_of_another_model_sees_neither_keys_nor_bytes(shared_daemon: Daemon) -> None:
    """Its directory is its own namespace's, and slots of another's are refused by its lane."""
    daemon = shared_daemon
    with engine_of(daemon, "one", model="a") as one, engine_of(daemon, "two", model="b") as two:
        keys = one.stored("of model a", 2)
        ready = one.scheduler.prepare_load(keys)
        assert two.load(keys) == (0, 0)
        two.poison(range(1, 5))
        for kind in ("load", "store"):
            assert not two.moves(kind, [1, 2, 3, 4], ready.slots, ready.generations)
        assert (two.memory[0][0].array[4096 : 5 * 4096] == POISON).all()
        assert keys[0] not in directory_of(daemon, "two")
        assert keys[0] in directory_of(daemon, "one")  # what is searched for would be found


def directory_of(daemon: Daemon, engine: str) -> bytes:
    """The directory that an engine's sessions get."""
    with RawClient(daemon.runtime_dir) as client:
        client.hello(engine=engine)
        _, (fd, *_) = client.notice(Attached)
        return os.pread(fd, os.fstat(fd).st_size, 0)


def test_bytes_that_no_store_of_the_namespace_wrote_cannot_be_loaded(
    start_daemon: StartDaemon,
) -> None:
    """Old bytes stay in a slot beside a smaller chunk, and no engine of any layout gets at them.

    They lie in blocks that the chunk lacks, in pages of another group, and between the end of
    the last page and the slot's rounding to 4 KiB.
    """
    daemon = start_daemon(cpu_bytes="1MiB")
    with engine_of(daemon, "before", model="a") as before:
        for part in range(4):
            before.stored(f"secret {part}", 16)
    pool = Path("/dev/shm") / pool_directory_name(daemon.runtime_dir) / "pool"
    secret = np.fromfile(pool, np.uint8)
    short, padded = make_layout(page=3000), make_layout(page=3072)
    slot_bytes = 12288  # of both: 4 pages of 3,000 bytes are rounded up, those of 3,072 fill it
    with (
        engine_of(daemon, "after", model="b", layout=short) as after,
        engine_of(daemon, "liar", model="b", layout=padded) as liar,
    ):
        parts = [(1, 1)] * 8
        taken = after.begin(keys_of("one block", 8), parts)
        assert len(taken.keys) == 8  # room that was another namespace's
        for at, key in enumerate(taken.keys):
            (block,) = after.fill([key], 1, group=1)[1:]
            chunk = taken.slots[at : at + 1], taken.generations[at : at + 1]
            assert after.moves("store", [block], *chunk, group=1, index=1)
        lookup = after.scheduler.lookup
        eventually(lambda: {lookup(key, 1, 1) for key in taken.keys} == {LookupResult.HIT})
        ready = after.scheduler.prepare_load(taken.keys, blocks=parts)
        content_now = np.fromfile(pool, np.uint8)
        for slot in ready.slots:
            begin = int(slot) * slot_bytes
            for unwritten in (slice(begin, begin + 3000), slice(begin + 6000, begin + slot_bytes)):
                # There is something to be found.
                assert (content_now[unwritten] == secret[unwritten]).all()
        for engine in (after, liar):
            engine.poison(range(64))
            for at in range(8):
                chunk = ready.slots[at : at + 1], ready.generations[at : at + 1]
                for group, index, blocks in (
                    (1, 0, [1, 2]),  # with the block that was not stored
                    (1, 0, [1]),
                    (0, 0, [1, 2]),  # another group, whose pages lie elsewhere in the slot
                    (0, 1, [1]),
                ):
                    assert not engine.moves("load", blocks, *chunk, group=group, index=index)
            for tensor in range(2):
                assert (engine.memory[0][tensor].array == POISON).all()
        assert not liar.scheduler.prepare_load(taken.keys, blocks=parts).keys
        for at, key in enumerate(taken.keys):
            chunk = ready.slots[at : at + 1], ready.generations[at : at + 1]
            assert after.moves("load", [2], *chunk, group=1, index=1)
            assert (after.page(0, 1, 2) == content(key, 0, 1, 1, 3000)).all()
        assert (after.page(0, 1, 1) == POISON).all()
        after.scheduler.complete_load(ready)


def test_keys_and_tokens_are_nowhere_to_be_read(
    start_daemon: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the log at its finest, the status, the metrics, the page or the events; raw or hex."""
    daemon = start_daemon("--http-listen", "127.0.0.1:0", "--log-level", "debug")
    secret = b"SECRETKEY"
    keys = [secret + bytes([65 + i]) * 23 + bytes(4) for i in range(6)]
    with caplog.at_level(logging.DEBUG), engine_of(daemon) as engine:
        token = token_of(engine)
        engine.store(keys)
        wait_hit(engine, keys)
        assert engine.load(keys) == (6, 0)
        given_up = [secret + b"lost".ljust(27, b".")]
        engine.begin(given_up)
        engine.scheduler.complete_store(given_up, success=False)
        bodies = (
            b"\x81\xa4used\x91\xc4" + bytes([len(secret)]) + secret + b"x",  # one byte too many
            b"\x81" + bytes([0xA0 + len(secret)]) + secret + b"\x01",  # as a field's name
            b"\x81\xa5slots\x92" + bytes([0xA0 + len(secret)]) + secret + b"\xc4\0",
        )
        replies = []
        with RawClient(daemon.runtime_dir) as client:
            client.hello()
            for body in bodies:
                client.send(WIRE.encode(Step(), 7)[:HEADER_BYTES] + body)
                replies.append(text_of(client.reply()[1]))
            client.send(secret * 2)
            assert isinstance(client.ask(Ping()), Pong)
        daemon.wait_log("does not begin with")
        with over_tcp(daemon) as http:
            texts = [*replies, caplog.text, *texts_of(daemon, http)]
        engine.scheduler.reset()
    assert daemon.stop() == 0
    texts.append(daemon.log.read_text())
    assert_hidden(texts, secret[:4], token)

"""The hub: keys, waits with an end, and strangers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dist_ckpt._worker.hub import Hub
from dist_ckpt._worker.hub_client import HubClient, HubLostError


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(("127.0.0.1",), grace_secs=0.1)
    yield hub
    hub.close()


@pytest.fixture
def client(hub: Hub) -> Iterator[HubClient]:
    client = HubClient(hub.address, 0, 5)
    yield client
    client.close()


def test_keys(client: HubClient) -> None:
    """The first to set a key has it; a prefix is deleted at once."""
    assert client.get("a/1") is None
    assert client.set_if_absent("a/1", b"first")
    assert not client.set_if_absent("a/1", b"second")
    assert client.get("a/1") == b"first"
    client.set("a/1", b"third")
    client.set("b/1", b"kept")
    client.delete_prefix("a/")

    assert client.get("a/1") is None
    assert client.get("b/1") == b"kept"


def test_a_large_value(client: HubClient) -> None:
    """Values may be larger than any buffer between the two."""
    value = bytes(range(256)) * (1 << 14)
    client.set("large", value)

    assert client.get("large") == value


def test_a_wait_ends_when_all_are_there(hub: Hub, client: HubClient) -> None:
    """Set by another client, in any order."""
    other = HubClient(hub.address, 1, 5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, {"x": 1, "y": None}, 30)
        other.set("y", b"")
        other.set("x", b"")
        assert waiting.result(120) == []
    assert client.wait({"x": 1}, 0) == []
    other.close()


def test_a_wait_ends_in_time(client: HubClient) -> None:
    """What is not there is named."""
    client.set("x", b"")

    assert client.wait({"x": 1, "z": 3, "y": 2}, 0.01) == ["y", "z"]


def test_nobody_waits_for_who_is_gone(hub: Hub, client: HubClient) -> None:
    """A connection that is gone for the grace ends the wait; one that came back does not."""
    gone = HubClient(hub.address, 1, 5)
    assert client.present() == [0, 1]
    gone.close()

    assert client.wait({"x": 1}, 60) == ["x"]
    assert client.absent() == [1]
    assert client.present() == [0]

    back = HubClient(hub.address, 1, 5)
    assert client.absent() == []
    assert client.wait({"x": 1}, 0.2) == ["x"]
    back.close()


def test_the_grace_begins_with_the_wait(hub: Hub, client: HubClient) -> None:
    """A rank whose worker died long ago may have another one that is just starting."""
    gone = HubClient(hub.address, 1, 5)
    gone.close()
    assert client.wait({"x": 1}, 60) == ["x"]
    assert client.absent() == [1]

    begun = time.monotonic()
    assert client.wait({"x": 1}, 60) == ["x"]

    assert time.monotonic() - begun > 0.1


def test_a_rank_with_two_connections_is_there(hub: Hub, client: HubClient) -> None:
    """A training process that stands in is the rank as well as its worker."""
    one, two = HubClient(hub.address, 1, 5), HubClient(hub.address, 1, 5)
    one.close()
    assert client.wait({"x": 1}, 0.3) == ["x"]

    assert client.absent() == []
    two.close()


def test_a_stranger_is_not_served(hub: Hub) -> None:
    """Without the token there is no answer, and nothing of what is sent is unpickled."""
    stranger = replace(hub.address, token=bytes(32))
    with pytest.raises(HubLostError, match="is not the hub"):
        HubClient(stranger, 1, 5)

    with socket.create_connection(("127.0.0.1", hub.address.port), 5) as stream:
        assert len(stream.recv(64)) == 32
        stream.sendall(bytes(32 + 8 + 32))
        stream.settimeout(5)
        assert stream.recv(64) == b""


def test_a_false_hub_is_not_believed(hub: Hub) -> None:
    """Who listens at the address must know the token too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.sendall(bytes(32))
                stream.recv(1024)
                stream.sendall(bytes(32))

        thread = threading.Thread(target=play)
        thread.start()
        false = replace(hub.address, port=listener.getsockname()[1])
        with pytest.raises(HubLostError, match="is not the hub"):
            HubClient(false, 1, 5)
        thread.join(120)


def test_the_token_is_not_shown(hub: Hub) -> None:
    """An address may stand in a log."""
    assert "token" not in repr(hub.address)


def test_the_next_host_is_tried(hub: Hub) -> None:
    """A host with several names is reached by the one that works."""
    hosts = ("no-such-host.invalid", "127.0.0.1")
    client = HubClient(replace(hub.address, hosts=hosts), 1, 30)
    client.set("a", b"")
    client.close()


def test_a_hub_that_is_gone_is_lost(hub: Hub, client: HubClient) -> None:
    """Who waits is told at once, and who asks later too."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, {"x": None}, 300)
        while not hub._table._waiters:
            threading.Event().wait(0.001)
        hub.close()
        # Ended without an answer, or with one: the key is not there.
        error = waiting.exception(30)
    if error is not None:
        assert isinstance(error, HubLostError)
    with pytest.raises(HubLostError, match=f"rank 0 cannot reach .*127.0.0.1:{hub.address.port}"):
        client.get("x")


def test_a_broken_connection_is_made_anew(hub: Hub, client: HubClient) -> None:
    """What a firewall cuts between two saves costs nothing."""
    client.set("x", b"1")
    assert client._frames is not None
    client._frames.shut_down()

    assert client.get("x") == b"1"


def test_a_closed_client_ends_its_wait(client: HubClient) -> None:
    """Closing from another thread is how a wait is given up."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, {"x": None}, 300)
        client.close()
        assert isinstance(waiting.exception(30), HubLostError)


def test_many_ranks_wait_for_one_key(hub: Hub) -> None:
    """All of them hear it."""
    clients = [HubClient(hub.address, rank, 5) for rank in range(32)]
    with ThreadPoolExecutor(31) as pool:
        waits = [pool.submit(c.wait, {"verdict": None}, 60) for c in clients[1:]]
        clients[0].set("verdict", b"yes")
        assert [wait.result(60) for wait in waits] == [[]] * 31
    for client in clients:
        client.close()
    assert hub._table._waiters == {}

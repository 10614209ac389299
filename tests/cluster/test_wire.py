"""Frames over a socket pair: whole ones only, of any size, with descriptors, and never a wait on the controller's side."""

import os
import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from asyncrl.cluster import wire

Pair = tuple[wire.Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    channel = wire.Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_a_frame_that_the_socket_cannot_hold_is_sent_bit_by_bit(pair: Pair) -> None:
    channel, theirs = pair
    data = os.urandom(5 * 10**6)
    channel.put(data)
    channel.pump()  # nobody reads, and it returns
    left = channel.has_to_send
    assert left
    got: list[bytes] = []
    reader = Thread(target=lambda: got.append(wire.receive_frame(theirs)[0]))
    reader.start()
    while channel.has_to_send:
        channel.pump()
    reader.join()
    assert got == [data]


def test_descriptors_come_with_their_frame_and_only_copies_are_sent(pair: Pair) -> None:
    channel, theirs = pair
    read, write = os.pipe()
    channel.put(b"first")
    channel.put(b"second", [write])
    channel.put(b"third")
    os.close(write)
    channel.pump()
    assert wire.receive_frame(theirs) == (b"first", [])
    data, fds = wire.receive_frame(theirs)
    assert data == b"second"
    os.write(fds[0], b"through")
    os.close(fds[0])
    assert os.read(read, 100) == b"through"
    assert os.read(read, 100) == b"", "a copy was left open"
    os.close(read)
    assert wire.receive_frame(theirs) == (b"third", [])


def test_only_whole_frames_are_taken(pair: Pair) -> None:
    channel, theirs = pair
    assert channel.take() == []
    wire.send_frame(theirs, b"")
    wire.send_frame(theirs, b"ab")
    theirs.sendall(b"\0\0\0\0\0\0\0\3c")
    assert channel.take() == [b"", b"ab"]
    assert channel.take() == []
    theirs.sendall(b"de")
    assert channel.take() == [b"cde"]
    theirs.close()
    with pytest.raises(EOFError):
        channel.take()


def test_the_end_of_the_other_side_is_seen(pair: Pair) -> None:
    channel, theirs = pair
    channel.close()
    with pytest.raises(EOFError):
        wire.receive_frame(theirs)

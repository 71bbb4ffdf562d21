"""Being told what others drop: one thread and one connection for each namespace that is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcomm.errors import ProtocolError
from kvcomm.store.base import MAX_GROUP_CHARS
from kvcomm.transfer.client import Client
from kvcomm.transfer.notices import Notices
from kvcomm.transfer.schema import Members
from kvcomm.types import Namespace

SILENCE_S = 30.0
OnDrop = Callable[[Namespace, str], None]


class Watches:
    """The threads that watch; none if nobody wants to know."""

    def __init__(self, on_drop: Sequence[OnDrop]) -> None:
        self._on_drop = tuple(on_drop)
        self._watching: list[Watch] = []

    def add(self, client: Client) -> None:
        """Watch a client's namespace."""
        if self._on_drop:
            self._watching.append(Watch(client, self._on_drop))

    def close(self) -> None:
        """End all; does not wait for a callback that runs."""
        for watch in self._watching:
            watch.close()


class Watch:
    """Calls ``on_drop`` for each drop, once, in order, also for those that happened while the service was away."""

    def __init__(self, client: Client, on_drop: Sequence[OnDrop]) -> None:
        self._client, self._on_drop = client, on_drop
        self._namespace = Namespace(client.namespace)
        self._version = -1
        self._notices = Notices(client, "watch", self._ask, self._take_in, SILENCE_S)

    def close(self) -> None:
        """End."""
        self._notices.close()

    def _ask(self) -> dict[str, object]:
        return {"call": "watch", "since": self._version}

    def _take_in(self, notice: Members, page: bytearray) -> bool:
        if page:
            raise ProtocolError(f"a notice of drops came with {len(page)} bytes; the connection is closed")
        version, groups = notice.integer("version", 0, 2**53), notice.texts("groups", MAX_GROUP_CHARS, 64)
        notice.end()
        for group in groups:
            for call in self._on_drop:
                with suppress(Exception):
                    call(self._namespace, group)
        before, self._version = self._version, version
        return version != before

"""The SumsService of a remote store: snapshots go up in parts, sums come down in pages, each call with one deadline."""

from __future__ import annotations

import secrets

from kvcomm.store.base import Deadline
from kvcomm.store.sums import Opened, Others
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.names import fingerprint_text
from kvcomm.transfer.upload import send_parts
from kvcomm.types import ModelFingerprint

SUMS_DEADLINE_S = 60.0
TEMPLATE = "all"
_COUNT = 2**53


class RemoteSums:
    """Learned sums of one namespace and model, at a service. Raises as kvcomm.store.sums.SumsService says.

    Args:
        deadline_s: for each call; a snapshot of a model of 135 million parameters has 25 to 200 MB.
    """

    def __init__(self, client: Client, fingerprint: ModelFingerprint, deadline_s: float = SUMS_DEADLINE_S) -> None:
        self._client, self._deadline_s = client, deadline_s
        self._subject = {"fingerprint": fingerprint_text(fingerprint), "template": TEMPLATE}

    def open(self, node: str) -> Opened:
        """Begin a new epoch of ``node``."""
        answer = self._client.call({"call": "sums_open", **self._subject, "node": node}, Deadline(self._deadline_s))
        found = answer.header
        epoch, found_it = found.integer("epoch", 0, _COUNT), found.truth("found")
        kept = found.integer("kept_epoch", 0, _COUNT), found.integer("kept_sequence", 0, _COUNT)
        found.end()
        return Opened(epoch, kept, bytes(answer.payload) if found_it else None)

    def put(self, node: str, epoch: int, sequence: int, data: bytes) -> bool:
        """Keep a snapshot. Sending it twice is the same as once, so a lost connection is tried again."""
        deadline, upload = Deadline(self._deadline_s), secrets.token_hex(16)
        request = {
            "call": "sums_put", **self._subject, "node": node, "epoch": epoch, "sequence": sequence, "upload": upload,
        }  # fmt: skip

        def work(connection: Connection) -> bool:
            found = send_parts(connection, [[memoryview(data)]], len(data), upload, deadline, request, None)
            return found if isinstance(found, bool) else found.truth("kept")

        return self._client.run(work, deadline)

    def others(self, node: str, epoch: int, known: str) -> Others:
        """The sum over all nodes but ``node``."""
        request = {"call": "sums_others", **self._subject, "node": node, "epoch": epoch, "known": known}
        answer = self._client.call(request, Deadline(self._deadline_s))
        version, found = answer.header.text("version", 64), answer.header.truth("found")
        answer.header.end()
        return Others(version, bytes(answer.payload) if found else None)

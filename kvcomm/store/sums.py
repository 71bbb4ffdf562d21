"""How nodes and the service speak about learned sums; what is in the bytes is kvcomm.anchors' affair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Opened:
    """A node's place at the service.

    Attributes:
        epoch: to be sent with every snapshot from now on.
        kept: (epoch, sequence) of the snapshot kept; (0, 0) where there is none.
        data: the node's own snapshot as kept, to go on from; None where there is none.
    """

    epoch: int
    kept: tuple[int, int]
    data: bytes | None


@dataclass(frozen=True)
class Others:
    """The sums of all other nodes.

    Attributes:
        version: names just these snapshots; to be given back as ``known``.
        data: None where ``version`` is what the node knows already.
    """

    version: str
    data: bytes | None


class SumsService(Protocol):
    """Where nodes meet, for one namespace, fingerprint and template. All calls raise StoreError."""

    def open(self, node: str) -> Opened:
        """Begin a new epoch of ``node``; an older process of this name is shut out."""
        ...

    def put(self, node: str, epoch: int, sequence: int, data: bytes) -> bool:
        """Keep a snapshot; False where one as high is kept already. Raises Superseded for another epoch."""
        ...

    def others(self, node: str, epoch: int, known: str) -> Others:
        """The sum over all nodes but ``node``; the empty name, with epoch 0, stands for one that learns nothing.

        Raises:
            Superseded: another epoch.
        """
        ...

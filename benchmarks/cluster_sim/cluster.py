"""The simulation: nodes that compute one call at a time, tiers of a node, and a service of shards behind them."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cluster_sim.costs import Costs
from benchmarks.cluster_sim.workload import Session, Shape, sessions

TIERS = ("memory", "disk", "service", "computed")
Text = tuple[int, int, int]  # namespace, session or -1, number: one segment's name


class Lru:
    """Texts held, at most ``room`` bytes; the least recently used goes first."""

    def __init__(self, room: float) -> None:
        self._room, self._used = room, 0.0
        self._held: OrderedDict[Text, float] = OrderedDict()

    def use(self, text: Text) -> bool:
        """Whether it is held; then it is the most recently used."""
        if text not in self._held:
            return False
        self._held.move_to_end(text)
        return True

    def add(self, text: Text, nbytes: float) -> None:
        """Hold it."""
        if nbytes > self._room or self.use(text):
            return
        self._held[text] = nbytes
        self._used += nbytes
        while self._used > self._room:
            self._used -= self._held.popitem(last=False)[1]


@dataclass(slots=True)
class Shard:
    """One process of the service: requests in order of arrival."""

    held: Lru
    free_s: float = 0.0
    busy_s: float = 0.0

    def serve(self, now_s: float, took_s: float) -> float:
        """When a request is done that arrives now."""
        self.free_s = max(now_s, self.free_s) + took_s
        self.busy_s += took_s
        return self.free_s


@dataclass(slots=True)
class Node:
    """One machine with a model."""

    memory: Lru
    disk: Lru
    waiting: deque[tuple[float, Session, int]] = field(default_factory=deque)
    busy: bool = False
    busy_s: float = 0.0


@dataclass
class Outcome:
    """What a run gives: seconds, tokens by tier, bytes."""

    nodes: int
    shards: int
    seconds: float
    ttft_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    fetched_bytes: float = 0.0
    put_bytes: float = 0.0
    shard_busy: list[float] = field(default_factory=list)
    node_busy: float = 0.0

    def summary(self) -> dict[str, object]:
        """Plain numbers, rounded."""
        total = max(1, sum(self.tokens.values()))
        p50, p95, p99 = np.percentile(self.ttft_s, [50, 95, 99]) if self.ttft_s else (0.0, 0.0, 0.0)
        service = np.percentile(self.waited_s, 95) if self.waited_s else 0.0
        return {
            "nodes": self.nodes, "shards": self.shards, "seconds": self.seconds, "calls": len(self.ttft_s),
            "share_of_tokens": {tier: round(count / total, 4) for tier, count in self.tokens.items()},
            "fetched_gb": round(self.fetched_bytes / 1e9, 3), "put_gb": round(self.put_bytes / 1e9, 3),
            "ttft_s": {"p50": round(float(p50), 4), "p95": round(float(p95), 4), "p99": round(float(p99), 4)},
            "service_p95_s": round(float(service), 4), "busiest_shard": round(max(self.shard_busy), 4),
            "mean_shard": round(sum(self.shard_busy) / len(self.shard_busy), 4), "node_busy": round(self.node_busy, 4),
        }  # fmt: skip


class Cluster:
    """``nodes`` nodes before ``shards`` shards; a namespace belongs to one shard. ``reuse=False``: all is computed."""

    def __init__(self, costs: Costs, shape: Shape, nodes: int, shards: int, seed: int, *, reuse: bool = True) -> None:
        self._costs, self._shape, self._reuse = costs, shape, reuse
        self._random = np.random.default_rng(seed)
        self._nodes = [Node(Lru(costs.node_bytes), Lru(costs.disk_bytes)) for _ in range(nodes)]
        self._shards = [Shard(Lru(costs.service_bytes)) for _ in range(shards)]
        self._last: dict[int, int] = {}
        self._events: list[tuple[float, int, str, tuple[object, ...]]] = []
        self._number = 0

    def run(self, seconds: float) -> Outcome:
        """Simulate until ``seconds``; calls that begin later are not counted."""
        outcome = Outcome(len(self._nodes), len(self._shards), seconds)
        for session in sessions(self._shape, len(self._nodes), seconds, self._random):
            self._push(session.begins_s, "call", (session, 0))
        while self._events:
            now_s, _, kind, what = heapq.heappop(self._events)
            if now_s > seconds:
                break
            if kind == "call":
                self._arrive(now_s, *what, outcome)  # type: ignore[arg-type]
            elif kind == "free":
                self._free(now_s, *what, outcome)  # type: ignore[arg-type]
            else:
                self._store(now_s, *what, outcome)  # type: ignore[arg-type]
        # What a shard has taken on for later than the end is one piece at the end of its time.
        outcome.shard_busy = [(s.busy_s - max(0.0, s.free_s - seconds)) / seconds for s in self._shards]
        outcome.node_busy = sum(node.busy_s for node in self._nodes) / seconds / len(self._nodes)
        return outcome

    def _push(self, at_s: float, kind: str, what: tuple[object, ...]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, kind, what))

    def _arrive(self, now_s: float, session: Session, call: int, outcome: Outcome) -> None:
        last = self._last.get(session.number)
        if last is None or self._random.random() >= self._shape.sticky:
            last = int(self._random.integers(len(self._nodes)))
        self._last[session.number] = last
        node = self._nodes[last]
        node.waiting.append((now_s, session, call))
        if not node.busy:
            self._free(now_s, node, outcome)

    def _free(self, now_s: float, node: Node, outcome: Outcome) -> None:
        node.busy = bool(node.waiting)
        if not node.busy:
            return
        arrived_s, session, call = node.waiting.popleft()
        texts = self._prompt(session, call)
        ready_s, compute_s, missing = self._prepare(now_s, node, session, texts, outcome)
        first_s = ready_s + compute_s
        answer = session.calls[call][2]
        done_s = first_s + answer * self._costs.decode_s
        outcome.ttft_s.append(first_s - arrived_s)
        node.busy_s += done_s - now_s
        if self._reuse:
            for text, tokens in missing:
                self._hold(node, text, tokens)
            self._push(done_s, "store", (session.namespace, missing))
        self._push(done_s, "free", (node,))
        if call + 1 < len(session.calls):
            self._push(done_s + session.calls[call + 1][0], "call", (session, call + 1))
        else:
            self._last.pop(session.number, None)

    def _prompt(self, session: Session, call: int) -> list[tuple[Text, int]]:
        """Texts of a call in order: the agent's template, what the namespace shares, what was said in the session."""
        shape, owner = self._shape, session.namespace
        agent = call % shape.agents
        texts: list[tuple[Text, int]] = [((owner, -1, -1 - agent), 64)]
        texts += [((owner, -1, number), shape.shared_tokens) for number in range(shape.shared_texts)]
        for number, (_, appended, answer) in enumerate(session.calls[: call + 1]):
            texts.append(((owner, session.number, number), appended + (answer if number < call else 0)))
        return texts

    def _prepare(
        self, now_s: float, node: Node, session: Session, texts: list[tuple[Text, int]], outcome: Outcome
    ) -> tuple[float, float, list[tuple[Text, int]]]:
        """(when all that is stored has come, seconds of computing behind that, texts that were computed)."""
        costs = self._costs
        disk = asked = fetched = before = 0
        compute_s, missing = costs.last_token_s, []
        shard = self._shards[session.namespace % len(self._shards)]
        for text, tokens in texts:
            tier = "computed"
            if self._reuse:
                if node.memory.use(text):
                    tier = "memory"
                elif node.disk.use(text):
                    tier, disk = "disk", disk + tokens
                    node.memory.add(text, tokens * costs.bytes_per_token)
                else:
                    asked += 1
                    if shard.held.use(text):
                        tier, fetched = "service", fetched + tokens
                        self._hold(node, text, tokens)
            if tier == "computed":
                compute_s += costs.dense_s(tokens, before)
                missing.append((text, tokens))
            else:
                again = tokens * costs.recompute_share
                compute_s += tokens * costs.splice_s + costs.dense_s(again, before + tokens - again)
            outcome.tokens[tier] += tokens
            before += tokens
        ready_s = now_s + disk * costs.bytes_per_token / costs.disk_bytes_s
        if asked:
            nbytes = fetched * costs.bytes_per_token
            served_s = shard.serve(now_s, asked * costs.service_call_s + nbytes / costs.service_bytes_s)
            here_s = max(served_s, now_s + nbytes / costs.network_bytes_s) + costs.network_rtt_s
            outcome.waited_s.append(here_s - now_s)
            outcome.fetched_bytes += nbytes
            ready_s = max(ready_s, here_s)
        return ready_s, compute_s, missing

    def _hold(self, node: Node, text: Text, tokens: int) -> None:
        nbytes = tokens * self._costs.bytes_per_token
        node.memory.add(text, nbytes)
        node.disk.add(text, nbytes)

    def _store(self, now_s: float, namespace: int, texts: list[tuple[Text, int]], outcome: Outcome) -> None:
        """What was computed goes to the service behind the answer."""
        shard = self._shards[namespace % len(self._shards)]
        for text, tokens in texts:
            nbytes = tokens * self._costs.bytes_per_token
            if not shard.held.use(text):
                shard.held.add(text, nbytes)
                outcome.put_bytes += nbytes
                shard.serve(now_s, self._costs.service_call_s + nbytes / self._costs.service_bytes_s)

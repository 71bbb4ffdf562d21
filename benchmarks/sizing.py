"""The arithmetic of docs/deploy.md: bytes a token, what a store of a size holds, what a hit rate asks of a network.

``python -m benchmarks.sizing`` prints the table; a test compares it with the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.errors import InvalidInput

GB = 1e9


@dataclass(frozen=True)
class Config:
    """The numbers of a model's published config.json that KV depends on; ``itemsize`` in bytes, 2 for bfloat16."""

    name: str
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * self.itemsize


MODELS = (
    Config("Llama-3.1-8B", 32, 8, 128),
    Config("Qwen3-14B", 40, 8, 128),
    Config("Llama-3.1-70B", 80, 8, 128),
)


@dataclass(frozen=True)
class Load:
    """What a cluster is asked.

    Attributes:
        nodes, calls_s: machines, and calls of each a second.
        prompt: tokens of a call. ``reused``: share of them that is reused. ``remote``: share of those from elsewhere.
    """

    nodes: int = 16
    calls_s: float = 0.5
    prompt: int = 8000
    reused: float = 0.8
    remote: float = 0.3

    def __post_init__(self) -> None:
        if (
            self.nodes < 1
            or self.calls_s <= 0
            or self.prompt < 1
            or not (0 <= self.reused <= 1 and 0 <= self.remote <= 1)
        ):
            raise InvalidInput(f"{self}: give at least one node and positive rates, and shares of 0 to 1")


def tokens_held(model: Config, nbytes: float) -> int:
    """Tokens of KV that fit."""
    return int(nbytes // model.bytes_per_token)


def node_gbit_s(model: Config, load: Load) -> float:
    """What each node fetches, in Gbit/s."""
    return load.calls_s * load.prompt * load.reused * load.remote * model.bytes_per_token * 8 / GB


def put_gbit_s(model: Config, load: Load) -> float:
    """What each node writes to the shared store, in Gbit/s: all that it computes, once."""
    return load.calls_s * load.prompt * (1 - load.reused) * model.bytes_per_token * 8 / GB


def fetch_s(model: Config, load: Load, gbit_s: float) -> float:
    """Seconds that a call's remote part is on the way, alone on a link."""
    return load.prompt * load.reused * load.remote * model.bytes_per_token * 8 / (gbit_s * GB)


def table(load: Load | None = None) -> list[str]:
    """Markdown."""
    load = load or Load()
    lines = [
        "| model | layers | KV heads | head dim | KV a token | 8,000 tokens | tokens in 64 GB | fetch a node "
        "| put a node | all nodes | remote part on 10 / 100 Gbit/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        get, put = node_gbit_s(model, load), put_gbit_s(model, load)
        lines.append(
            f"| {model.name} | {model.num_hidden_layers} | {model.num_key_value_heads} | {model.head_dim} "
            f"| {model.bytes_per_token / 1024:.0f} KiB | {8000 * model.bytes_per_token / GB:.2f} GB "
            f"| {tokens_held(model, 64 * GB):,} | {get:.2f} Gbit/s | {put:.2f} Gbit/s "
            f"| {(get + put) * load.nodes:.0f} Gbit/s "
            f"| {fetch_s(model, load, 10):.2f} / {fetch_s(model, load, 100):.3f} s |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))

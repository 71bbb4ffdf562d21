"""A storage node in a process of its own: ``python mooncake_node.py MASTER MIB``. It ends when its input does."""

import sys

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]) << 20, 16 << 20, "tcp", "", sys.argv[1])
print(f"node {code}", flush=True)
sys.stdin.read()

"""Five agents that share KV on a real model: live in the terminal, and a page about it."""

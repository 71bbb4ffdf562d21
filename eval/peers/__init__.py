"""Other programs that reuse KV, each run as it is shipped and compared with its own dense runs."""

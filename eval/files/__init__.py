"""Files and the terminal: what is fetched, kept, read, written and shown."""

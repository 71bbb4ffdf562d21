"""Studies beside the presets: a question each, and what its rows come to."""

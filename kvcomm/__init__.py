"""kvcomm: reuse the KV cache of any piece of text at any position and in any agent."""

__version__ = "0.1.0"

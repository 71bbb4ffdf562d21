"""Answers run as programs, kept in by the kernel (program.py)."""

"""Evaluation of kvcomm: models, tasks, runs and reports. Not part of the installed package."""

"""The evaluation suite: presets of cells, their figures with intervals, the report and the comparison of two runs."""

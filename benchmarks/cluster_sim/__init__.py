"""A cluster simulated from measured unit costs and shapes of published traces: docs/cluster-sim.md."""

"""A cluster simulated from unit costs that were measured and shapes of traces that were published: docs/cluster-sim.md."""

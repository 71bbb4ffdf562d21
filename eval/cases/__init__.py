"""What is measured on: problems made into cases of a wanted length, and a catalogue of tools."""

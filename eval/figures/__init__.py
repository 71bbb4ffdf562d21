"""What numbers are made of."""

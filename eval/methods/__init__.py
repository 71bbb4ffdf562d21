"""The methods that are compared."""

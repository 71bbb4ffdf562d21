"""Ways in from agent frameworks; each module needs the extra of its name, and nothing imports it unasked."""

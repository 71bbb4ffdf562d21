"""How long runs run: in what setting, in how many processes, and what is kept of a run that is cut off."""

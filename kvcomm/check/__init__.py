"""Is reuse safe on this model and these prompts? Dense against reused, measured; and the calibration of predictions."""

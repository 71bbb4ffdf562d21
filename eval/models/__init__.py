"""The model that everything is measured on, a small one of another family, and chat templates."""

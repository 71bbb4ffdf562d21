"""What pages are made of: HTML, inline plots, and texts made harmless in Markdown."""

"""Wrong attentions on purpose, each the likeness of a real bug: what the comparison must see. Files are found by name."""

"""Wrong attentions on purpose, each the likeness of a real bug that a comparison must see. Files are found by name."""

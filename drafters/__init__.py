"""Draft-free drafters, one file a method."""

"""A small committed example: a real sweep of llama.cpp, and made-up numbers where a figure needs what it lacks."""

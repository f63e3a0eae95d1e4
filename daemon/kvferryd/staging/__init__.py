"""The parts of a staged transfer that both ends share: arena and slots, copies, and what of a plan a slot carries."""

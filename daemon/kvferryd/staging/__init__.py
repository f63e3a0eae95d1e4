"""What both ends of a staged transfer share: the arena and its slots, the copies, and what of a plan a slot carries."""

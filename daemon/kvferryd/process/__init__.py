"""The daemon as a process: its start and stop, its parent, its memory."""

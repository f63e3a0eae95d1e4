"""What the daemon tells people: log lines, metrics, spans."""

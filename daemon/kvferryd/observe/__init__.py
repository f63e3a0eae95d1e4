"""Log lines, metrics and spans: what the daemon tells its operators."""

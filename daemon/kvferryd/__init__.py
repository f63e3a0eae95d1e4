"""kvferryd: the transfer daemon that runs beside every GPU. docs/architecture.md has the picture."""

"""`kvferry explain` and POST /v1/explain: who reads what from whom, by the same functions that do it."""

from kvferryd.explain.command import explain_command, main
from kvferryd.explain.summary import Bindings, explain_json, source_tables_from_json
from kvferryd.explain.words import explain_text

__all__ = ["Bindings", "explain_command", "explain_json", "explain_text", "main", "source_tables_from_json"]

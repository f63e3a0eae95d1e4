"""The source side: what an engine published, who reads it, and what is packed for them."""

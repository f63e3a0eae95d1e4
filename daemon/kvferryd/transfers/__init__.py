"""The destination side: orders meet reservations, and KV is read by one of three ways."""

"""HTTP/1.1 to engines and other services."""

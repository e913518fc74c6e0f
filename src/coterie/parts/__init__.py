"""Parts that several methods are built from."""

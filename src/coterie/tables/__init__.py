"""Tables of rows, columns and clients: how files are read, and what becomes of their columns."""

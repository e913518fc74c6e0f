"""One table, analysed: do its clients differ, are there groups, what differs between them, and what is gained."""

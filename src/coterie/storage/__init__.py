"""Files: federations that are mapped into memory, and snapshots of states."""

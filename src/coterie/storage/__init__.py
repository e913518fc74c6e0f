"""Files: mapped federations, snapshots of states."""

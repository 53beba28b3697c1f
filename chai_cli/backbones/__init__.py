"""Model families: one file each, one record for each model known by name."""

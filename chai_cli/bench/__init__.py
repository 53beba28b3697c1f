"""`chai bench`: methods side by side on the same requests, and beside plain sampling with fewer steps."""

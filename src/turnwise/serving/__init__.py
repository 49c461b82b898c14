"""Many engines behind one interface: workers, their manager and their scheduler."""

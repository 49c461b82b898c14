"""Many engines behind one face: workers, the manager that keeps them, the scheduler before them."""

"""What is read of Linux and asked of it, with real processes."""

"""What the commands of the command line do. Each prints, and returns its exit code."""

"""What every package builds on: checked settings, files written whole, and text that is safe to print."""

"""What every package stands on: checked settings, files written whole, and text that is safe to print."""

"""What a run leaves behind: rows of requests, gaps between tokens, the fleet and its pools."""

"""Router modes: each file holds a family of them; `modes` lists all by name."""

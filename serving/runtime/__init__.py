"""The distributed runtime: namespaces, components, endpoints and instances that find and call each other."""

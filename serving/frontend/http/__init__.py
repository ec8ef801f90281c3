"""Connections and bodies, with limits in bytes and seconds."""

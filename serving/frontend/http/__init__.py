"""Connections and bodies within limits of bytes and seconds."""

"""A running engine or server, seen from outside: what it tells over HTTP as one frame at a time."""

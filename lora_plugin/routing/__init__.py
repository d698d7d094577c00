"""From what a client's request says to the version of an adapter that answers it."""

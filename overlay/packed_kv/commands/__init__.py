"""`packed-kv`: one door to all commands. Each is imported when it is called, and needs no more than it uses."""

"""Object stores to test with: one in memory, and servers on 127.0.0.1."""

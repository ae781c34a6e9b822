"""What the processes that tests start do: each function runs in a process of its own."""

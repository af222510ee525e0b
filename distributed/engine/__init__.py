"""What the remote calls are built on: how ranks are started and meet, and how RPC sessions and messages work."""
